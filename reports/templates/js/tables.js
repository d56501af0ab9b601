// Tables: sorting of every .sortable one, and charts' data as tables, built when first opened.

/** What a cell sorts by: the exact number it carries, else its text. NaN counts as the largest. */
function sortKey(row, column) {
  const cell = row.cells[column];
  const exact = cell.dataset.v ?? cell.querySelector("data")?.value;
  if (exact !== undefined) return exact === "" ? null : finite(Number(exact));
  const text = cell.textContent.trim();
  return text === "—" ? null : text;
}

const finite = (value) => (Number.isNaN(value) ? Infinity : value);

function sortBy(button) {
  const head = button.closest("th");
  const table = head.closest("table");
  const column = [...head.parentNode.cells].indexOf(head);
  const numeric = head.classList.contains("num");
  const before = head.getAttribute("aria-sort");
  const down = before ? before === "ascending" : numeric; // numbers begin with the largest
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  for (const body of table.tBodies) {
    const rows = [...body.rows].filter((row) => !row.classList.contains("group"));
    const keyed = rows.map((row) => [sortKey(row, column), row]);
    keyed.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null); // absent ones go last
      const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
      return down ? -order : order;
    });
    body.append(...keyed.map(([, row]) => row));
  }
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("table.sortable th button");
  if (button) sortBy(button);
});

/** Returns a sortable table. Columns: {label, form} with form "" for text; rows: arrays. */
function makeTable(columns, rows) {
  const head = columns.map(({ label, form }) =>
    `<th scope="col"${form ? ' class="num"' : ""}><button type="button">${label}</button></th>`);
  const cell = (value, { form, html, absent }) => {
    if (!form) return `<td>${html ? html(value) : esc(value ?? "—")}</td>`;
    return `<td class="num" data-v="${value ?? ""}">${absent && value === null ? absent : esc(shown(value, form))}</td>`;
  };
  const body = rows.map((row) => `<tr>${row.map((value, i) => cell(value, columns[i])).join("")}</tr>`);
  return element("table", { class: "sortable" },
    `<thead><tr>${head.join("")}</tr></thead><tbody>${body.join("")}</tbody>`);
}

const column = (key, form = "", html = null) => ({ label: t(key), form, html });
const code = (value) => `<code>${esc(value)}</code>`;

/** name -> () => [columns, rows]; filled by the chart that owns the data. */
const DATA_TABLES = {};

function fillTable(details) {
  const holder = details.querySelector(".scroll");
  holder.querySelector("table")?.remove();
  const [columns, rows] = DATA_TABLES[details.dataset.table]();
  holder.append(makeTable(columns, rows));
}
const tableOpened = (event) => { if (event.target.open) fillTable(event.target); };

function readyTables() {
  for (const details of document.querySelectorAll("details[data-table]")) {
    if (DATA_TABLES[details.dataset.table]) details.addEventListener("toggle", tableOpened);
    else details.remove();
  }
}
