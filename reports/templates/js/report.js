// The rest of a run's page: windows, activation ranges, sweeps; then everything is started.
function startWindows() {
  const W = D.windows;
  if (!W || !$("windows")) return;
  const fields = [["window_kl", "sig"], ["window_top1", "pct"], ["window_nll", "sig"]].filter(([name]) => W[name].length);
  const told = (i) => fields.map(([name, form]) => [t(name), shown(W[name][i], form)]);
  dots($("windows"), W.window_kl, {
    low: W.kl_low, high: W.kl_high, middle: W.kl_mean, form: "sig", label: (i) => tipRows(`${t("window")} ${i}`, told(i)),
  });
  DATA_TABLES.windows = () => [
    [column("window", "plain"), ...fields.map(([name, form]) => column(name, form))],
    W.window_kl.map((_, i) => [i, ...fields.map(([name]) => W[name][i])]),
  ];
}

const FP16_MAX = 65504;
function startActivations() {
  if (!$("ranges")) return;
  const byRole = Object.entries(worstByRole("input_absmax"));
  const all = numbers(byRole.flatMap(([, values]) => values)).filter((v) => v > 0);
  const [low, high] = [Math.log10(least(all)), Math.log10(Math.min(most(all), FP16_MAX))];
  const rows = byRole.map(([role, values]) => ({
    label: code(role), values, form: "sig", scale: "count", share: (v) => (v > 0 ? (Math.log10(v) - low) / (high - low || 1) : 0),
    marked: (i) => values[i] > FP16_MAX,
  }));
  const strips = drawStrips($("ranges"), rows, L.layer);
  document.addEventListener("restyle", strips.paint);
}

function startSweep() {
  if (!D.sweeps.length || !$("sweep")) return;
  const batches = [...new Set(D.sweeps.flatMap((s) => s.points.map((p) => p.batch)))].sort((a, b) => a - b);
  const values = D.sweeps.map((s) => batches.map((b) => s.points.find((p) => p.batch === b)?.tokens_per_s ?? null));
  const series = D.sweeps.map((s, i) => ({
    text: `${s.op}, ${s.target}`, form: "rate", dash: s.how === "measured" ? undefined : [6, 4], hollow: s.how !== "measured", colour: SERIES[i % SERIES.length],
  }));
  D.sweeps.forEach((s, i) => {
    values.push(batches.map((b) => (b === s.peak_batch ? s.points.find((p) => p.batch === b)?.tokens_per_s ?? null : null)));
    series.push({ text: `${said("peak")}, ${s.target}`, form: "rate", width: 0, ring: true, colour: SERIES[i % SERIES.length] });
  });
  curve("sweep", [batches, ...values], series, {
    x: { key: "batch", log: 2, ticks: batches }, y: [{ key: "tokens_per_s", form: "int", range: [0, most(values.flat()) * 1.1] }], height: 280,
  });
  const how = (value) => t(`how.${value}`);
  DATA_TABLES.sweep = () => [
    [column("op"), column("target"), column("how", "", how), column("batch", "plain"), column("median_s", "time"), column("low_s", "time"), column("high_s", "time"), column("tokens_per_s", "rate")],
    D.sweeps.flatMap((s) => s.points.map((p) => [s.op, s.target, s.how, p.batch, p.median_s, p.low_s, p.high_s, p.tokens_per_s])),
  ];
}

// Bars made by the template carry their words in data-tip.
document.addEventListener("pointermove", (event) => {
  const bar = event.target.closest?.("[data-tip]");
  if (bar) showTip(esc(bar.dataset.tip), event.clientX, event.clientY);
  else if (event.target.closest?.(".bars")) hideTip();
});

for (const start of [startExperts, startLayers, startWindows, startIndexer, startRouter, startActivations, startSweep, startBudget, startEffects]) start();
readyTables();
finished();
