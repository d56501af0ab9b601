// Heat strips: rows of measures over columns of layers, as SVG that stretches with the page.
/**
 * One strip a row. rows: {label, values, form, scale, share(v), marked(i), down, quiet};
 * `share` maps a value to [0, 1] of its colour scale; absent values leave a gap, values that are
 * not numbers a warning colour. columns: the layers' numbers. onPick(i) makes columns choosable.
 */
function drawStrips(host, rows, columns, { onPick = null, title = (i) => `${t("layer")} ${columns[i]}` } = {}) {
  host.replaceChildren();
  const chosen = element("i", { class: "chosen", hidden: "" });
  const lanes = [];
  for (const row of rows) {
    if (row.heading) { host.append(element("p", { class: "heading" }, row.heading)); continue; }
    if (!has(row.values)) { host.append(element("div", { class: "lane unseen" }, `<span class="name">${row.label}</span><span class="none">${t("not_observed")}</span>`)); continue; }
    row.drawn = columns.map((_, i) => i).filter((i) => row.values[i] !== null && row.values[i] !== undefined);
    const cells = row.drawn.map((i) => `<rect x="${i}" width="1" height="1"/>`).join("");
    const line = element("div", { class: "lane" },
      `<span class="name">${row.label}</span>` +
      `<svg viewBox="0 0 ${columns.length} 1" preserveAspectRatio="none" aria-hidden="true">${cells}</svg>` +
      `<span class="range">${rangeOf(row)}</span>`);
    host.append(line);
    lanes.push([row, line, line.querySelector("svg")]);
  }
  host.append(axis(columns), chosen);
  const paint = () => lanes.forEach(([row, line, svg]) => paintLane(row, line, svg));
  paint();

  const columnAt = (event) => {
    const box = lanes[0][2].getBoundingClientRect();
    const at = Math.floor(((event.clientX - box.left) / box.width) * columns.length);
    return at >= 0 && at < columns.length ? at : null;
  };
  host.onpointermove = (event) => {
    const at = lanes.length && event.target.closest(".lane svg") ? columnAt(event) : null;
    if (at === null) return hideTip();
    const here = lanes.find(([, , svg]) => svg === event.target.closest("svg"))[0];
    const told = lanes.map(([row]) => row).filter((row) => !row.quiet || row === here);
    const line = (row) => [row === here ? `<mark>${row.label}</mark>` : row.label, shown(row.values[at], row.form)];
    showTip(tipRows(title(at), told.map(line)), event.clientX, event.clientY);
  };
  host.onpointerleave = hideTip;
  if (onPick) host.onclick = (event) => {
    const at = event.target.closest(".lane svg") ? columnAt(event) : null;
    if (at !== null) onPick(at);
  };
  return {
    paint,
    choose(at) {
      chosen.hidden = false;
      host.style.setProperty("--at", at / columns.length);
      host.style.setProperty("--wide", 1 / columns.length);
    },
  };
}

/** From the best to the worst value of a row, with the colours between. */
function rangeOf(row) {
  const [from, to] = row.ends = row.down ? [most(row.values), least(row.values)] : [least(row.values), most(row.values)];
  if (from === to) return `<span></span><i class="scale"></i><span>${shown(to, row.form)}</span>`;
  return `<span>${shown(from, row.form)}</span><i class="scale"></i><span>${shown(to, row.form)}</span>`;
}

function paintLane(row, line, svg) {
  const colour = scaleOf(row.scale);
  row.drawn.forEach((at, i) => {
    const value = row.values[at];
    const marked = row.marked?.(at) || typeof value !== "number";
    svg.children[i].setAttribute("fill", marked ? "var(--bad)" : colour(row.share(value)));
  });
  line.querySelector(".scale").style.background = gradient(row.scale, ...row.ends.map(row.share));
}

function axis(columns) {
  const step = columns.length > 40 ? 10 : columns.length > 12 ? 5 : 1;
  const marks = columns
    .map((number, i) => (number % step === 0 ? `<i style="left:${((i + 0.5) / columns.length) * 100}%">${number}</i>` : ""))
    .join("");
  return element("div", { class: "axis", "aria-hidden": "true" }, `<span></span><span>${marks}</span><span></span>`);
}

/** A row that grows darker with its value, from 0 to its own maximum. */
function lossRow(label, values, form, more = {}) {
  const top = most(values);
  return {
    label, values, form, scale: "loss", share: (v) => (top > 0 ? v / top : 0), ...more,
  };
}

/** A row of shares where 1 is perfect: darker is further below it. */
function shareRow(label, values, bottom, more = {}) {
  const low = Math.min(bottom, 0.9999);
  return {
    label, values, form: "pct", scale: "loss", down: true, share: (v) => (1 - v) / (1 - low), ...more,
  };
}
