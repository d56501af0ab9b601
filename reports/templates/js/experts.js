// Experts: a canvas heat map of layer x expert (20,000 cells), and one layer's experts as dots.
const E = D.experts && unpack(D.experts);

function unpack(packed) {
  const starts = [];
  packed.counts.reduce((sum, count) => { starts.push(sum); return sum + count; }, 0);
  const fallen = new Set(packed.fallen.map(([layer, expert]) => `${layer}/${expert}`));
  return { ...packed, starts, fallen };
}

/** {tokens, error, method, fell} of an expert; `row` is a place in E.layer. */
function expertAt(row, expert) {
  const i = E.starts[row] + expert;
  return {
    layer: E.layer[row], expert, tokens: E.tokens[i], error: E.error[i],
    method: E.methods[parseInt(E.method[i], 36)], fell: E.fallen.has(`${E.layer[row]}/${expert}`),
  };
}
const expertsOf = (layer) => {
  const row = E ? E.layer.indexOf(layer) : -1;
  return row < 0 ? [] : Array.from({ length: E.counts[row] }, (_, expert) => expertAt(row, expert));
};
const expertTip = (e) => tipRows(`${t("layer")} ${e.layer} · ${t("expert")} ${e.expert}`, [
  [t("expert_error"), shown(e.error, "sig")], [t("tokens"), shown(e.tokens, "int")], [t("method"), esc(e.method)], ...(e.fell ? [[t("fell"), "●"]] : []),
]);

function startExperts() {
  if (!E || !$("expert-map")) return;
  const host = $("expert-map");
  const canvas = element("canvas", { tabindex: "0", role: "img", "aria-labelledby": "expert-map-title" });
  const legend = element("p", { class: "scale-line" });
  host.append(expertAxis(), canvas, expertTicks(Math.max(...E.counts)), legend);
  const wide = Math.max(...E.counts);
  let by = "error";
  let cursor = null;
  const draw = () => {
    const marks = drawExperts(canvas, wide, by, cursor);
    host.dataset.cells = marks.cells;
    host.dataset.fallen = marks.fallen;
    legend.innerHTML = `${marks.low}<i class="scale"></i>${marks.high} <span class="swatch"></span>${t("fell")}`;
    legend.querySelector(".scale").style.background = gradient(marks.scale);
  };
  onRestyle(draw);
  let drawn = canvas.clientWidth;
  new ResizeObserver(() => {
    if (canvas.clientWidth !== drawn) draw();
    drawn = canvas.clientWidth;
  }).observe(host);
  const cellAt = (event) => {
    const box = canvas.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) / box.height) * E.layer.length);
    const expert = Math.floor(((event.clientX - box.left) / box.width) * wide);
    return row >= 0 && row < E.layer.length && expert >= 0 && expert < E.counts[row] ? [row, expert] : null;
  };
  canvas.addEventListener("pointermove", (event) => {
    const cell = cellAt(event);
    if (cell) showTip(expertTip(expertAt(...cell)), event.clientX, event.clientY);
    else hideTip();
  });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    const [row, expert] = cursor ?? [0, -step[1]];
    cursor = [Math.min(Math.max(row + step[0], 0), E.layer.length - 1), Math.min(Math.max(expert + step[1], 0), wide - 1)];
    draw();
    const box = canvas.getBoundingClientRect();
    showTip(expertTip(expertAt(...cursor)), box.left + ((cursor[1] + 0.5) / wide) * box.width, box.top + ((cursor[0] + 0.5) / E.layer.length) * box.height);
  });
  canvas.addEventListener("blur", () => { cursor = null; hideTip(); draw(); });
  $("experts-by").addEventListener("click", (event) => {
    by = event.target.closest("button")?.dataset.by ?? by;
    for (const button of $("experts-by").children) button.setAttribute("aria-pressed", button.dataset.by === by);
    draw();
  });
  let layer = E.layer[0];
  const details = document.querySelector('details[data-table="experts"]');
  document.addEventListener("layer", (event) => { layer = event.detail; if (details.open) fillTable(details); });
  DATA_TABLES.experts = () => [
    [column("layer", "plain"), column("expert", "plain"), column("expert_error", "sig"), column("tokens", "int"), column("method", "", code), column("fell", "", (v) => (v ? "●" : ""))],
    expertsOf(expertsOf(layer).length ? layer : E.layer[0]).map((e) => [e.layer, e.expert, e.error, e.tokens, e.method, e.fell]),
  ];
}

/** Layer numbers beside the map, expert numbers under it. */
function expertAxis() {
  const step = E.layer.length > 40 ? 10 : E.layer.length > 12 ? 5 : 1;
  const marks = E.layer.map((layer, i) => (layer % step ? "" : `<i style="top:${((i + 0.5) / E.layer.length) * 100}%">${layer}</i>`));
  return element("div", { class: "down", "aria-hidden": "true" }, marks.join(""));
}
function expertTicks(wide) {
  const step = wide > 64 ? 32 : wide > 16 ? 8 : 2;
  const marks = Array.from({ length: Math.ceil(wide / step) }, (_, i) => `<i style="left:${((i * step + 0.5) / wide) * 100}%">${i * step}</i>`);
  return element("div", { class: "across", "aria-hidden": "true" }, marks.join(""));
}

/** Paints every cell on whole device pixels; returns what the legend says. */
function drawExperts(canvas, wide, by, cursor) {
  const width = canvas.clientWidth;
  const cellHeight = E.layer.length > 40 ? 6 : E.layer.length > 12 ? 10 : 18;
  const height = E.layer.length * cellHeight;
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const paint = canvas.getContext("2d");
  const values = by === "error" ? E.error : E.tokens;
  const scale = by === "error" ? "loss" : "count";
  const colour = scaleOf(scale);
  const sorted = Float64Array.from(numbers(values)).sort();
  // The colour scale ends at the 99.5th percentile: one outlier must not wash out the rest.
  const top = sorted[Math.floor((sorted.length - 1) * 0.995)] || 1;
  const low = sorted[0] ?? 0;
  const x = Array.from({ length: wide + 1 }, (_, i) => Math.round((i / wide) * canvas.width));
  const y = Array.from({ length: E.layer.length + 1 }, (_, i) => Math.round((i / E.layer.length) * canvas.height));
  const bad = css("--bad");
  const marks = { cells: 0, fallen: 0, scale, low: shown(low, by === "error" ? "sig" : "int"), high: `≥ ${shown(top, by === "error" ? "sig" : "int")}` };
  for (let row = 0; row < E.layer.length; row += 1)
    for (let expert = 0; expert < E.counts[row]; expert += 1) {
      const value = values[E.starts[row] + expert];
      paint.fillStyle = Number.isFinite(value) ? colour((value - low) / (top - low || 1)) : bad;
      paint.fillRect(x[expert], y[row], x[expert + 1] - x[expert], y[row + 1] - y[row]);
      marks.cells += 1;
    }
  paint.strokeStyle = bad;
  paint.lineWidth = Math.max(1.5 * ratio, 1);
  for (let row = 0; row < E.layer.length; row += 1)
    for (let expert = 0; expert < E.counts[row]; expert += 1)
      if (E.fallen.has(`${E.layer[row]}/${expert}`)) { box(paint, x, y, row, expert, ratio); marks.fallen += 1; }
  if (cursor) { paint.strokeStyle = css("--ink"); box(paint, x, y, ...cursor, ratio * 2); }
  return marks;
}
const box = (paint, x, y, row, expert, grow) =>
  paint.strokeRect(x[expert] - grow / 2, y[row] - grow / 2, x[expert + 1] - x[expert] + grow, y[row + 1] - y[row] + grow);

/** One layer's experts: tokens seen across (logarithmic), error up. */
function scatter(panel, layer) {
  const experts = expertsOf(layer);
  panel.append(element("h4", {}, experts.length ? t("experts.title") : ""));
  if (!experts.length) { panel.lastChild.remove(); return; }
  const high = most(experts.map((e) => e.error)) * 1.05 || 1;
  const decades = Math.ceil(Math.log10(most(experts.map((e) => e.tokens)) + 1)) || 1;
  const at = (tokens) => (Math.log10(tokens + 1) / decades) * 100;
  const dot = (e, i) =>
    `<i class="dot${e.fell ? " fell" : ""}" style="left:${at(e.tokens).toFixed(2)}%;bottom:${((numbers([e.error])[0] ?? high) / high * 100).toFixed(2)}%" data-i="${i}"></i>`;
  const ticks = [0, ...Array.from({ length: decades }, (_, i) => 10 ** (i + 1))].map((n) => [at(n), compact(n)]);
  const plot = element("div", { class: "scatter", "data-marks": experts.length },
    `<div class="field">${roundTicks(0, high, 4).map((v) => `<i class="level" style="bottom:${(v / high) * 100}%">${tick(v, "sig")}</i>`).join("")}${experts.map(dot).join("")}</div><div class="scale-axis" aria-hidden="true">${axisMarks(ticks)}</div><p class="under">${t("tokens")}</p>`);
  plot.onpointermove = (event) => {
    const hit = event.target.closest(".dot");
    if (hit) showTip(expertTip(experts[hit.dataset.i]), event.clientX, event.clientY);
    else hideTip();
  };
  plot.onpointerleave = hideTip;
  panel.append(plot);
}
