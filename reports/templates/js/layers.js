// Layers: error by depth, the strip over all layers, and the drill-down to one of them.
const L = D.layers;
const M = D.matrices;
const matrixRow = (row) => {
  const named = {};
  ["module", "role", "scheme", "method"].forEach((word, i) => { named[word] = M.words[word][row[i]]; });
  M.numbers.forEach((name, i) => { named[name] = row[i + 4]; });
  return named;
};
const matricesOf = (layer) => (M.rows[layer] ?? []).map(matrixRow);
const klKey = D.layer_kl ? `kl.${D.layer_kl}` : "kl";

/** role -> the layer's worst matrix of that role, by `field`; null where it has none. */
function worstByRole(field) {
  const roles = M.words.role;
  const pick = (layer, role) => {
    const found = matricesOf(layer).filter((m) => m.role === role).map((m) => m[field]);
    return found.find((v) => typeof v === "string") ?? (numbers(found).length ? most(found) : null);
  };
  return Object.fromEntries(roles.map((role) => [role, L.layer.map((layer) => pick(layer, role))]));
}

function roleRows(heading, byRole, form, share) {
  const entries = Object.entries(byRole).filter(([, values]) => has(values));
  if (!entries.length) return [];
  const rows = entries.map(([role, values]) => ({
    label: code(role), values, form, scale: "loss", share, quiet: true,
  }));
  return [{ heading }, ...rows];
}

function stripRows() {
  const rows = [];
  for (const name of ["error", "hidden_error"]) if (has(L[name])) rows.push(lossRow(t(name), L[name], "sig"));
  if (has(L.kl)) rows.push(lossRow(t(klKey), L.kl, "sig"));
  if (has(L.fallbacks)) rows.push(lossRow(t("fallbacks"), L.fallbacks, "int", { scale: "count" }));
  const measured = Object.keys(D.roles).length > 0;
  const errors = measured ? D.roles : worstByRole("error");
  const top = Object.values(errors).reduce((high, values) => Math.max(high, most(values)), 0);
  rows.push(...roleRows(t(measured ? "roles.measured" : "roles.calibrated"), errors, "sig", (v) => (top ? v / top : 0)));
  // Fewer bits darker: 16 is the paper, 4 nearly the darkest.
  rows.push(...roleRows(t("roles.bits"), worstByRole("bits"), "bits", (v) => Math.min(Math.max((17 - v) / 15, 0.04), 1)));
  return rows;
}

function startLayers() {
  if (!$("strip")) return;
  const series = [];
  const data = [L.layer];
  for (const [name, colour] of [["error", "--c0"], ["hidden_error", "--c1"]])
    if (has(L[name])) { series.push({ key: name, form: "sig", colour, points: L.layer.length < 100 }); data.push(L[name]); }
  if (series.length) curve("depth", data, series, { x: { key: "layer" }, y: [{ form: "sig", range: [0, most(data.slice(1).flat()) * 1.08] }] });
  else $("depth").closest("figure").remove();

  const range = $("layer");
  range.max = L.layer.length - 1;
  const strips = drawStrips($("strip"), stripRows(), L.layer, { onPick: (at) => choose(at) });
  document.addEventListener("restyle", strips.paint);
  const choose = (at) => {
    range.value = at;
    $("layer-now").textContent = L.layer[at];
    range.setAttribute("aria-valuetext", L.layer[at]);
    strips.choose(at);
    drill(at, choose);
    document.dispatchEvent(new CustomEvent("layer", { detail: L.layer[at] }));
  };
  range.addEventListener("input", () => choose(Number(range.value)));
  const worst = [L.kl, L.error, L.hidden_error].find((values) => numbers(values).length) ?? [];
  choose(Math.max(worst.indexOf(most(worst)), 0));

  const fields = [["error", "sig"], ["hidden_error", "sig"], ["kl", "sig"], ["topk_overlap", "pct"], ["topk_overlap_p1", "pct"],
    ["router_agreement", "pct"], ["source_bytes", "size"], ["quantized_bytes", "size"], ["fallbacks", "int"], ["time_s", "time"]]
    .filter(([name]) => has(L[name]));
  const kind = (value) => (value ? t(`kind.${value}`) : "—");
  const roles = Object.keys(D.roles);
  DATA_TABLES.layers = () => [
    [column("layer", "plain"), column("kind", "", kind), ...fields.map(([name, form]) => column(name === "kl" ? klKey : name, form)),
      ...roles.map((role) => ({ label: code(role), form: "sig" }))],
    L.layer.map((layer, i) => [layer, L.kind[i], ...fields.map(([name]) => L[name][i]), ...roles.map((role) => D.roles[role][i])]),
  ];
  DATA_TABLES.matrices = () => [
    [column("layer", "plain"), ...MATRIX_COLUMNS(), column("weight_error", "sig")],
    L.layer.flatMap((layer) => matricesOf(layer).map((m) => [layer, ...[...MATRIX_FIELDS, "weight_error"].map((f) => m[f])])),
  ];
}

const MATRIX_FIELDS = ["module", "role", "scheme", "method", "matrices", "bits", "error", "input_absmax", "output_absmax", "input_p999", "outlier_channels"];
const MATRIX_COLUMNS = () => [
  column("module", "", code), column("role", "", code), column("scheme", "", code), column("method", "", code), column("matrices", "int"), column("bits", "bits"),
  column("matrix_error", "sig"), ...["input_absmax", "output_absmax"].map((name) => ({ ...column(name, "sig"), absent: `<span class="none">${t("not_observed")}</span>` })),
  column("input_p999", "sig"), column("outlier_channels", "int"),
];

function drill(at, choose) {
  const layer = L.layer[at];
  const panel = $("drill");
  const facts = [["error", "sig"], ["hidden_error", "sig"], ["kl", "sig"], ["topk_overlap", "pct"], ["router_agreement", "pct"],
    ["source_bytes", "size"], ["quantized_bytes", "size"], ["time_s", "time"], ["fallbacks", "int"]];
  const told = facts.filter(([name]) => L[name][at] !== null).map(([name, form]) =>
    `<div><dt>${t(name === "kl" ? klKey : name)}</dt><dd data-field="${name}" data-v="${L[name][at]}">${shown(L[name][at], form)}</dd></div>`);
  const kind = L.kind[at] ? `${t(`kind.${L.kind[at]}`)} · ${t(`indexer.${L.indexer[at]}`)}` : "";
  panel.innerHTML =
    `<div class="panel-head"><h3 id="drill-title">${t("layer")} <span data-layer="${layer}">${layer}</span> <small>${kind}</small></h3>` +
    `<button type="button" data-step="-1">←<span class="hush">${t("previous")}</span></button><button type="button" data-step="1">→<span class="hush">${t("next")}</span></button></div>` +
    `<dl class="facts">${told.join("")}</dl>`;
  panel.querySelectorAll("[data-step]").forEach((button) => {
    const to = at + Number(button.dataset.step);
    button.disabled = to < 0 || to >= L.layer.length;
    button.addEventListener("click", () => { choose(to); panel.querySelector(`[data-step="${button.dataset.step}"]`)?.focus(); });
  });
  const matrices = matricesOf(layer);
  if (matrices.length) {
    const holder = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-labelledby": "drill-title" });
    holder.append(makeTable(MATRIX_COLUMNS(), matrices.map((m) => MATRIX_FIELDS.map((f) => m[f]))));
    panel.append(element("h4", {}, t("matrices.title")), holder);
  }
  scatter(panel, layer);
}
