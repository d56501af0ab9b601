// What everything else uses: the page's data, both languages, number formats, tooltip, theme.
const root = document.documentElement;
const $ = (id) => document.getElementById(id);
const page = await unpacked($("data").textContent);
const D = page.data;
const LANGUAGES = { en: "en", zh: "zh-CN" };
const NARROW = "\u202f";

/** The page's data travels as base64 of gzipped JSON: a sixth of its size. */
async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

const esc = (value) => String(value).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

/** Both languages as HTML; the page's style hides one. Unknown keys are shown as they are. */
function t(key) {
  const both = page.strings[`js.${key}`];
  if (!both) return esc(key);
  return `<span lang="en">${esc(both[0])}</span><span lang="zh-CN">${esc(both[1])}</span>`;
}

/** The current language's text, for canvases and attributes; redraw on "restyle". */
function said(key) {
  const both = page.strings[`js.${key}`];
  return both ? both[root.dataset.lang === "zh" ? 1 : 0] : key;
}

function element(tag, attributes = {}, html = "") {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (html) made.innerHTML = html;
  return made;
}

// The same formats as reports/text.py.
function significant(value, digits = 4) {
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return "0";
  const exponent = Number(value.toExponential(digits - 1).split("e")[1]);
  if (exponent >= -4 && exponent < 6)
    return value.toFixed(Math.max(digits - 1 - exponent, 0)).replace("-", "−");
  return value.toExponential(digits - 1).replace("e+", "e").replaceAll("-", "−");
}
const scaled = (value, units, digits) => {
  for (const [unit, factor] of units)
    if (Math.abs(value) >= factor * 0.9995) return significant(value / factor, digits) + NARROW + unit;
  return null;
};
const FORMATS = {
  sig: (v) => significant(v),
  plain: (v) => String(v),
  int: (v) => Math.trunc(v).toLocaleString("en-US"),
  bits: (v) => String(Number(v.toFixed(3))),
  pct: (v) => (v * 100).toFixed(v > 0.999 && v < 1 ? 3 : 2) + NARROW + "%",
  size: (v) => scaled(v, [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]], 4) ?? `${v}${NARROW}B`,
  time: (v) => seconds(v),
  flop: (v) => scaled(v, [["Pflop", 1e15], ["Tflop", 1e12], ["Gflop", 1e9], ["Mflop", 1e6]], 3) ?? `${v}${NARROW}flop`,
  rate: (v) => (v >= 100 ? Math.round(v).toLocaleString("en-US") : significant(v, 3)) + NARROW + "/s",
};
function seconds(value) {
  const two = (n) => String(n).padStart(2, "0");
  if (value >= 3600) {
    const minutes = Math.round(value / 60);
    return `${Math.floor(minutes / 60)}${NARROW}h ${two(minutes % 60)}${NARROW}min`;
  }
  if (value >= 60) {
    const whole = Math.round(value);
    return `${Math.floor(whole / 60)}${NARROW}min ${two(whole % 60)}${NARROW}s`;
  }
  return scaled(value, [["s", 1], ["ms", 1e-3], ["µs", 1e-6]], 3) ?? significant(value / 1e-9, 3) + NARROW + "ns";
}
/** A round value on an axis, without the zeros that a table needs. */
const tick = (value, form) => shown(value, form).replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");

/** Marks of an axis, [percent, text] each; those at its ends are kept from sticking out. */
const axisMarks = (marks) => marks
  .map(([at, text]) => `<i${at < 2 ? ' class="first"' : at > 97 ? ' class="last"' : ""} style="left:${at}%">${text}</i>`)
  .join("");

/** 10k, 1M: powers of ten on a narrow axis. */
const compact = (value) => new Intl.NumberFormat("en", { notation: "compact" }).format(value);

/** About `many` round values from low to high. */
function roundTicks(low, high, many = 5) {
  const raw = (high - low) / many || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}
/** null: not measured. A string ("nan", "inf") is a number JSON cannot say, shown as it is. */
const shown = (value, form) =>
  value === null || value === undefined ? "—" : typeof value === "number" ? FORMATS[form](value) : String(value);

// Tooltip: follows the pointer, or stands by the keyboard's cell.
const tip = $("tip");
function showTip(html, x, y) {
  tip.innerHTML = html;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 14 + box.width > innerWidth ? x - box.width - 14 : x + 14;
  tip.style.left = `${Math.max(4, Math.min(left, innerWidth - box.width - 4))}px`;
  tip.style.top = `${y + 14 + box.height > innerHeight ? Math.max(4, y - box.height - 14) : y + 14}px`;
}
const hideTip = () => { tip.hidden = true; };
const tipRows = (title, rows) =>
  `<b>${title}</b><table>${rows.map(([k, v]) => `<tr><th>${k}</th><td>${v}</td></tr>`).join("")}</table>`;

// Theme and language. Charts that paint colours or words listen for "restyle".
const restyle = () => document.dispatchEvent(new Event("restyle"));
const onRestyle = (draw) => { document.addEventListener("restyle", draw); draw(); };
const remember = (key, value) => { try { localStorage.setItem(`glm5q.${key}`, value); } catch { /* file: pages may not keep any */ } };
const recall = (key) => { try { return localStorage.getItem(`glm5q.${key}`); } catch { return null; } };
const systemDark = matchMedia("(prefers-color-scheme: dark)");
const paper = matchMedia("print");
const isDark = () => !paper.matches && (root.dataset.theme ? root.dataset.theme === "dark" : systemDark.matches);

function setLanguage(language) {
  root.dataset.lang = language;
  root.lang = LANGUAGES[language];
}
$("language").addEventListener("click", () => {
  setLanguage(root.dataset.lang === "en" ? "zh" : "en");
  remember("language", root.dataset.lang);
  restyle();
});
$("theme").addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  remember("theme", root.dataset.theme);
  restyle();
});
setLanguage(LANGUAGES[recall("language")] ? recall("language") : /^zh/i.test(navigator.language) ? "zh" : "en");
if (["light", "dark"].includes(recall("theme"))) root.dataset.theme = recall("theme");
for (const media of [systemDark, paper]) media.addEventListener("change", restyle);
let screenTheme;
addEventListener("beforeprint", () => { screenTheme = root.dataset.theme; root.dataset.theme = "light"; restyle(); });
addEventListener("afterprint", () => { if (screenTheme) root.dataset.theme = screenTheme; else delete root.dataset.theme; restyle(); });

const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();

// Sequential colour scales, monotone in lightness, so they read without colour too.
const SCALES = {
  loss: { light: ["#f0efe9", "#d5dfdf", "#9dc3cc", "#5a9db8", "#2b7199", "#1d4a75", "#1b2450"],
          dark: ["#20252c", "#213a50", "#245f80", "#3288a0", "#63b2a9", "#b0d6a4", "#fbf1b4"] },
  count: { light: ["#f2eee6", "#ead9bf", "#dfb98a", "#cb9061", "#a96650", "#7a4148", "#43253c"],
           dark: ["#241f26", "#432e44", "#6f4152", "#a05a55", "#cf8058", "#edb274", "#fdeab4"] },
};
const parsed = new Map();
function scaleOf(name) {
  const key = name + (isDark() ? "dark" : "light");
  if (!parsed.has(key)) {
    const stops = SCALES[name][isDark() ? "dark" : "light"].map((hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)));
    const table = Array.from({ length: 256 }, (_, i) => {
      const at = (i / 255) * (stops.length - 1);
      const low = Math.min(Math.floor(at), stops.length - 2);
      return `rgb(${stops[low].map((c, j) => Math.round(c + (stops[low + 1][j] - c) * (at - low))).join()})`;
    });
    parsed.set(key, table);
  }
  const table = parsed.get(key);
  return (share) => table[Math.round(Math.min(Math.max(share, 0), 1) * 255)];
}
/** The stretch of a scale from share `low` to share `high`. */
const gradient = (name, low = 0, high = 1) => {
  const colour = scaleOf(name);
  const stops = [0, 0.17, 0.33, 0.5, 0.67, 0.83, 1].map((s) => colour(low + (high - low) * s));
  return `linear-gradient(90deg,${stops.join()})`;
};
const numbers = (values) => values.filter((v) => typeof v === "number" && Number.isFinite(v));
const most = (values) => numbers(values).reduce((a, b) => Math.max(a, b), -Infinity);
const least = (values) => numbers(values).reduce((a, b) => Math.min(a, b), Infinity);
const has = (values) => values.some((v) => v !== null && v !== undefined);

/** Says that everything is drawn; the mark is when the browser has painted it. */
function finished() {
  root.dataset.ready = "true";
  requestAnimationFrame(() => setTimeout(() => performance.mark("glm5q.painted")));
}
