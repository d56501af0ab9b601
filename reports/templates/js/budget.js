// A size budget: KL against bits, and every choice as a table; and what serving can switch.
function startBudget() {
  if (!D.budget || !$("budget-curve")) return;
  const points = D.budget.curve;
  const data = [points.map((p) => p.bits), points.map((p) => p.kl)];
  const series = [{ key: "budget.sum", form: "sig", dash: [5, 4] }];
  if (points.some((p) => p.kl_measured !== null)) { series.push({ key: "budget.measured", form: "sig", colour: "--c1" }); data.push(points.map((p) => p.kl_measured)); }
  data.push(points.map((p) => (p.nbytes === D.budget.nbytes ? p.kl : null)));
  series.push({ key: "budget.here", form: "sig", width: 0, ring: true });
  curve("budget-curve", data, series, {
    x: { key: "bits", form: "bits" }, y: [{ key: "kl", form: "sig", range: [0, most(data.slice(1).flat()) * 1.08 || 1] }],
  });
  DATA_TABLES.budget = () => [
    [column("layer", "plain"), column("role", "", code), column("scheme"), column("budget.taken"), column("quantized_bytes", "size"), column("kl", "sig"), column("budget.measured", "sig")],
    D.budget.units.flatMap((u) => u.choices.map((c, i) => [u.layer, u.role, c.scheme, said(i === u.chosen ? "budget.yes" : "budget.no"), c.nbytes, c.kl, c.kl_measured])),
  ];
}

function startEffects() {
  if (!D.effects?.sweep.length || !$("topk-effects")) return;
  const points = D.effects.sweep;
  const data = [points.map((p) => p.k), points.map((p) => p.kl), points.map((p) => p.attention_mass)];
  curve("topk-effects", data, [{ key: "kl", form: "sig" }, { key: "mass", form: "pct", axis: 1, dash: [5, 4], colour: "--c1" }], {
    x: { key: "k", log: 2, ticks: data[0] },
    y: [{ key: "kl", form: "sig", range: [0, most(data[1]) * 1.08 || 1] }, { key: "mass", form: "pct", range: [0, 1] }],
  });
}
