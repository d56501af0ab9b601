// Curves by uPlot, restyled with the page, sized to their holder; and dots in SVG.
const SERIES = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5"];

/**
 * Draws `data` ([x, ...series]) in the element `id` and redraws it on "restyle".
 * series: {key or text, form, dash, points, axis}; x: {key, log, form}; y: {form}, one a scale.
 */
function curve(id, data, series, { x = {}, y = [{}], height = 240 } = {}) {
  const host = $(id);
  let plot = null;
  const build = () => {
    plot?.destroy();
    plot = new uPlot(options(host, data, series, { x, y, height }), data, host);
    host.dataset.marks = data.slice(1).reduce((sum, values) => sum + numbers(values).length, 0);
  };
  onRestyle(build);
  new ResizeObserver(() => {
    if (plot.width !== host.clientWidth) plot.setSize({ width: host.clientWidth, height });
  }).observe(host);
}

function options(host, data, series, { x, y, height }) {
  const font = `12px ${getComputedStyle(document.body).fontFamily}`;
  const grid = { stroke: css("--line"), width: 1 };
  const base = { stroke: css("--soft"), font, labelFont: font, grid, ticks: { show: false }, labelSize: 18 };
  const scaleName = (i) => (i ? `y${i + 1}` : "y");
  const scales = { x: { time: false, distr: x.log ? 3 : 1, log: x.log ?? 10 } };
  y.forEach((one, i) => { scales[scaleName(i)] = { range: one.range }; });
  return {
    width: host.clientWidth, height, scales,
    cursor: { points: { size: 7 }, drag: { x: false, y: false } },
    legend: { live: true },
    axes: [
      { ...base, label: said(x.key), size: 30, ...(x.key === "layer" ? { incrs: [1, 2, 5, 10, 20, 50] } : {}), ...(x.ticks ? { splits: () => x.ticks, filter: (u, s) => s } : {}),
        values: (u, splits) => splits.map((v) => tick(v, x.form ?? "plain")) },
      ...y.map((one, i) => ({
        ...base, scale: scaleName(i), side: i ? 1 : 3, size: i ? 78 : 64, gap: i ? 8 : 5, grid: i ? { show: false } : grid,
        label: one.key ? said(one.key) : null,
        values: (u, splits) => splits.map((v) => tick(v, one.form)),
      })),
    ],
    series: [
      { label: said(x.key), value: (u, v) => shown(v, x.form ?? "plain") },
      ...series.map((one, i) => line(one, i, scaleName)),
    ],
  };
}

function line(one, i, scaleName) {
  const stroke = css(one.colour ?? SERIES[i % SERIES.length]);
  const fill = one.hollow ? css("--paper") : stroke;
  return {
    label: one.text ?? said(one.key), scale: scaleName(one.axis ?? 0), stroke, width: one.width ?? 2, dash: one.dash,
    spanGaps: true, value: (u, v) => shown(v, one.form),
    points: { show: one.points ?? true, size: one.ring ? 15 : 6, stroke, fill: one.ring ? "transparent" : fill, width: 1.5 },
  };
}

/** Dots over one axis, spread downwards where they crowd; band and line for an interval. */
function dots(host, values, { low, high, middle, form, label, zero = false }) {
  const room = (most([...values, high]) - Math.min(least([...values, low]), 0)) * 0.03;
  const top = Math.max(most([...values, high]), 0) + room;
  const bottom = Math.min(least([...values, low]) - (zero ? room : 0), 0);
  const at = (v) => ((v - bottom) / (top - bottom || 1)) * 100;
  const rows = [];
  const placed = values.map((value) => [value, at(value), 0]);
  const order = placed.map((_, i) => i).sort((a, b) => placed[a][1] - placed[b][1]);
  for (const i of order) {
    let row = rows.findIndex((last) => placed[i][1] - last > 1.9);
    if (row < 0) row = rows.length;
    rows[row] = placed[i][1];
    placed[i][2] = row;
  }
  const step = Math.min(13, 110 / Math.max(rows.length, 1));
  const marks = placed.map(([value, x, row], i) =>
    `<i class="dot" style="left:${x}%;bottom:${6 + row * step}px" data-v="${value}" data-i="${i}"></i>`);
  const ticks = roundTicks(bottom, top);
  host.innerHTML =
    `<div class="field" style="height:${Math.max(rows.length * step + 20, 60)}px">` +
    `<i class="band" style="left:${at(low)}%;width:${at(high) - at(low)}%"></i><i class="mean" style="left:${at(middle)}%"></i>${zero ? `<i class="zero" style="left:${at(0)}%"></i>` : ""}` +
    `${marks.join("")}</div><div class="scale-axis" aria-hidden="true">${axisMarks(ticks.map((v) => [at(v), tick(v, form)]))}</div>`;
  host.dataset.marks = placed.length;
  host.onpointermove = (event) => {
    const dot = event.target.closest(".dot");
    if (!dot) return hideTip();
    showTip(label(Number(dot.dataset.i)), event.clientX, event.clientY);
  };
  host.onpointerleave = hideTip;
}
