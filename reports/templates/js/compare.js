// Runs side by side: KL difference by window, and error by depth of every run.
function startDeltas() {
  D.window_delta.forEach((deltas, i) => {
    if (!deltas.length) return;
    const [mean, low, high] = D.kl[i];
    dots($(`delta-${i}`), deltas, {
      low: low ?? mean, high: high ?? mean, middle: mean, form: "sig", zero: true,
      label: (at) => tipRows(`${t("window")} ${at}`, [[t("kl_delta"), shown(deltas[at], "sig")]]),
    });
  });
  const named = D.names.slice(1).map((name, i) => [name, D.window_delta[i]]).filter(([, deltas]) => deltas.length);
  if (!named.length) return;
  DATA_TABLES.deltas = () => [
    [column("window", "plain"), ...named.map(([name]) => ({ label: esc(name), form: "sig" }))],
    named[0][1].map((_, at) => [at, ...named.map(([, deltas]) => deltas[at] ?? null)]),
  ];
}

function startDepths() {
  const field = D.layers.some((run) => run.hidden_error.some((v) => v !== null)) ? "hidden_error" : "error";
  const layers = [...new Set(D.layers.flatMap((run) => run.layer))].sort((a, b) => a - b);
  if (!layers.length) { $("depths").innerHTML = `<p class="absent">${t("not_measured")}</p>`; return; }
  const values = D.layers.map((run) => layers.map((layer) => run[field][run.layer.indexOf(layer)] ?? null));
  const series = D.names.map((name, i) => ({ text: name, form: "sig", points: layers.length < 40, dash: i ? undefined : [6, 4], colour: i ? SERIES[(i - 1) % 4] : "--c4" }));
  curve("depths", [layers, ...values], series, { x: { key: "layer" }, y: [{ key: field, form: "sig", range: [0, most(values.flat()) * 1.08] }], height: 280 });
  DATA_TABLES.depths = () => [
    [column("layer", "plain"), ...D.names.map((name) => ({ label: esc(name), form: "sig" }))],
    layers.map((layer, at) => [layer, ...values.map((one) => one[at])]),
  ];
}

for (const start of [startDeltas, startDepths]) start();
readyTables();
finished();
