// Indexer: overlap by layer and position, which tokens are selected, recall against k. Router too.
const I = D.indexer;

function overlapRows() {
  const rows = [];
  const buckets = I ? I.layers.flatMap((one) => one.overlap) : [];
  const low = Math.min(least([...L.topk_overlap, ...buckets]), 0.99);
  if (has(L.topk_overlap)) rows.push(shareRow(t("topk_overlap"), L.topk_overlap, low));
  if (has(L.topk_overlap_p1)) rows.push(shareRow(t("topk_overlap_p1"), L.topk_overlap_p1, least(L.topk_overlap_p1)));
  if (!I?.layers.length) return rows;
  const byLayer = new Map(I.layers.map((one) => [one.layer, one.overlap]));
  rows.push({ heading: t("position") });
  for (let b = 0; b + 1 < I.bucket_edges.length; b += 1) {
    const values = L.layer.map((layer) => byLayer.get(layer)?.[b] ?? null);
    if (has(values)) rows.push(shareRow(bucket(b), values, low));
  }
  return rows;
}
const bucket = (b) => `${shown(I.bucket_edges[b], "int")} – ${shown(I.bucket_edges[b + 1], "int")}`;

function startIndexer() {
  if (!$("overlap")) return;
  const rows = overlapRows();
  if (rows.every((row) => row.heading)) {
    const everything = I && I.context <= I.topk;
    $("overlap").innerHTML = `<p class="absent">${t(everything ? "overlap.all" : "not_measured")}</p>`;
  } else startOverlap(rows);
  if (I?.selection.length) startSelection();
  if (I?.recall.length) startRecall();
}

function startOverlap(rows) {
  const strips = drawStrips($("overlap"), rows, L.layer);
  document.addEventListener("restyle", strips.paint);
  const told = rows.filter((row) => !row.heading);
  DATA_TABLES.overlap = () => [
    [column("layer", "plain"), ...told.map((row) => ({ label: row.label, form: "pct" }))],
    L.layer.map((layer, i) => [layer, ...told.map((row) => row.values[i])]).filter((row) => has(row.slice(1))),
  ];
}

function selectionMap(one, which) {
  const blocks = one[which].length;
  const canvas = element("canvas", { width: blocks, height: blocks, "aria-hidden": "true", "data-marks": one[which].flat().length });
  onRestyle(() => {
    const [paint, colour] = [canvas.getContext("2d"), scaleOf("loss")];
    // An even choice over the past would be 1 / (q + 1); six times that is the darkest.
    one[which].forEach((row, q) => row.forEach((share, k) => {
      paint.fillStyle = colour(Math.sqrt(share / Math.min(1, 6 / (q + 1))));
      paint.fillRect(k, q, 1, 1);
    }));
  });
  canvas.onpointermove = (event) => {
    const edge = canvas.getBoundingClientRect();
    const q = Math.floor(((event.clientY - edge.top) / edge.height) * blocks);
    const k = Math.floor(((event.clientX - edge.left) / edge.width) * blocks);
    if (one[which][q]?.[k] === undefined) return hideTip();
    const from = (block) => `${shown(block * one.block, "int")} – ${shown((block + 1) * one.block, "int")}`;
    showTip(tipRows(`${t("layer")} ${one.layer}`, [[t("query_block"), from(q)], [t("key_block"), from(k)],
      ...["source", "quantized"].filter((w) => one[w].length).map((w) => [t(w), shown(one[w][q][k], "pct")])]), event.clientX, event.clientY);
  };
  canvas.onpointerleave = hideTip;
  const figure = element("div", { class: "square" }, `<span>${t("layer")} ${one.layer} · ${t(which)}</span>`);
  figure.append(canvas);
  return figure;
}

function startSelection() {
  const host = $("selection");
  for (const one of I.selection) {
    const pair = element("div", { class: "pair" });
    for (const which of ["source", "quantized"]) if (one[which].length) pair.append(selectionMap(one, which));
    host.append(pair);
  }
  DATA_TABLES.selection = () => [
    [column("layer", "plain"), column("query_block", "plain"), column("key_block", "plain"), column("source", "pct"), column("quantized", "pct")],
    I.selection.flatMap((one) => one.source.flatMap((row, q) => row.map((share, k) => [one.layer, q, k, share, one.quantized[q]?.[k] ?? null]))),
  ];
}

function startRecall() {
  const points = I.recall;
  const series = [{ key: "mass", form: "pct" }];
  const data = [points.map((p) => p.k), points.map((p) => p.attention_mass)];
  if (points.some((p) => p.attention_mass_p5 !== null)) { series.push({ key: "mass_p5", form: "pct", dash: [5, 4], colour: "--c0" }); data.push(points.map((p) => p.attention_mass_p5)); }
  series.push({ key: "flop", form: "flop", axis: 1, colour: "--c1" });
  data.push(points.map((p) => p.flop));
  const low = least(data.slice(1, -1).flat());
  curve("recall", data, series, {
    x: { key: "k", log: 2, ticks: data[0] },
    y: [{ key: "mass", form: "pct", range: [Math.max(0, low - (1 - low) * 0.15), 1] }, { key: "flop", form: "flop", range: [0, most(data.at(-1)) * 1.08] }],
  });
}

function startRouter() {
  const host = $("router-chart");
  if (!host) return;
  if (!has(L.router_agreement)) { host.innerHTML = `<p class="absent">${t("not_measured")}</p>`; return; }
  const rows = L.layer.map((layer, i) => [layer, L.router_agreement[i]]).filter(([, v]) => v !== null);
  const low = least(rows.map(([, v]) => v));
  curve("router-chart", [rows.map(([l]) => l), rows.map(([, v]) => v)], [{ key: "router_agreement", form: "pct" }], {
    x: { key: "layer" }, y: [{ form: "pct", range: [Math.max(0, low - (1 - low) * 0.3), 1] }], height: 200,
  });
  DATA_TABLES.router = () => [[column("layer", "plain"), column("router_agreement", "pct")], rows];
}
