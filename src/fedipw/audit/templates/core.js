// What every plot shares: numbers as text, elements, symbols, scales.
// Text from the data goes through textContent only.

const MISSING = "–";

function grouped(text) {
  const [whole, part] = text.split(".");
  const commas = whole.replace(/\B(?=(\d{3})+$)/g, ",");
  return part === undefined ? commas : `${commas}.${part}`;
}

function fixedText(value, digits) {
  const text = Math.abs(value).toFixed(digits);
  return (value < 0 && Number(text) !== 0 ? "−" : "") + grouped(text);
}

function significantText(value, digits) {
  if (value === 0) return "0";
  const [mantissa, power] = Math.abs(value).toExponential(digits - 1).split("e");
  const e = Number(power);
  if (e >= -6 && e < 15) return fixedText(value, Math.max(0, digits - 1 - e));
  return `${value < 0 ? "−" : ""}${mantissa}e${e < 0 ? "−" : "+"}${Math.abs(e)}`;
}

function known(value, text) {
  return typeof value === "number" && Number.isFinite(value) ? text(value) : MISSING;
}

const format = {
  count: (v) => known(v, (x) => fixedText(x, 0)),
  fixed: (v) => known(v, (x) => fixedText(x, 3)),
  number: (v) => known(v, (x) => significantText(x, 3)),
  tidy: (v) => {
    const text = format.number(v);
    return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text;
  },
  share: (v) => known(v, (x) => {
    const p = 100 * x;
    if (p === 0) return "0%";
    return `${Math.abs(p) >= 1 ? fixedText(p, 1) : significantText(p, 2)}%`;
  }),
};

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

// --- elements ---

function make(tag, attributes = {}, parent = null) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (parent) parent.append(node);
  return node;
}

function html(tag, className, text = "", parent = null) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

function write(parent, x, y, text, className = "tick", anchor = "start") {
  const node = make("text", { x, y, class: className, "text-anchor": anchor }, parent);
  node.textContent = text;
  return node;
}

const ruler = document.createElement("canvas").getContext("2d");

function textWidth(text, size = 12) {
  ruler.font = `${size}px ${getComputedStyle(document.body).fontFamily}`;
  return ruler.measureText(text).width;
}

function shortened(text, width, size = 12) {
  if (textWidth(text, size) <= width) return text;
  const letters = Array.from(text);
  let low = 0;
  let high = letters.length;
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (textWidth(`${letters.slice(0, middle).join("")}…`, size) <= width) low = middle;
    else high = middle - 1;
  }
  return `${letters.slice(0, low).join("").trimEnd()}…`;
}

const OUTLINES = {
  circle: (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0Z`,
  square: (r) => `M${-r * 0.9},${-r * 0.9}h${r * 1.8}v${r * 1.8}h${-r * 1.8}Z`,
  diamond: (r) => `M0,${-r * 1.25}L${r * 1.25},0L0,${r * 1.25}L${-r * 1.25},0Z`,
  up: (r) => `M0,${-r * 1.15}L${r * 1.15},${r * 0.9}H${-r * 1.15}Z`,
  down: (r) => `M0,${r * 1.15}L${r * 1.15},${-r * 0.9}H${-r * 1.15}Z`,
};

function symbol(parent, x, y, series, extra = {}) {
  const hollow = series.hollow ? " hollow" : "";
  return make("path", {
    d: OUTLINES[series.shape || "circle"](extra.r || 5),
    transform: `translate(${x},${y})`,
    class: `${extra.class || "mark"} ${series.colour}${hollow}`,
  }, parent);
}

// --- scales ---

function niceTicks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) {
    ticks.push(Number((k * step).toPrecision(12)));
  }
  return ticks;
}

function logTicks(low, high, wanted) {
  const all = [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 5, 7]].map((set) => {
    const found = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e += 1) {
      for (const m of set) {
        const tick = Number((m * 10 ** e).toPrecision(6));
        if (tick >= low * 0.999 && tick <= high * 1.001) found.push(tick);
      }
    }
    return found;
  });
  const fitting = all.filter((ticks) => ticks.length >= 2 && ticks.length <= wanted + 1);
  if (fitting.length) return fitting[fitting.length - 1];
  const ends = all.find((ticks) => ticks.length >= 2) || all[3];
  if (ends.length < 2) return niceTicks(low, high, wanted);
  const every = Math.ceil(ends.length / (wanted + 1));
  return ends.filter((_, k) => k % every === 0);
}

function scale(domain, range, log = false) {
  const f = log ? Math.log10 : (v) => v;
  const [a, b] = domain.map(f);
  const at = (v) => range[0] + ((f(v) - a) / (b - a || 1)) * (range[1] - range[0]);
  at.domain = domain;
  at.ticks = (wanted) => (log ? logTicks(...domain, wanted) : niceTicks(...domain, wanted));
  return at;
}

function extent(values, { zero = false, pad = 0.04, log = false } = {}) {
  const numbers = values.filter((v) => isNumber(v) && (!log || v > 0));
  if (!numbers.length) return log ? [0.1, 1] : [0, 1];
  let [low, high] = [Infinity, -Infinity];
  for (const v of numbers) {
    low = Math.min(low, v);
    high = Math.max(high, v);
  }
  if (log) return low === high ? [low / 2, high * 2] : [low, high];
  if (zero) [low, high] = [Math.min(0, low), Math.max(0, high)];
  if (zero && low === high) high = 1;
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const room = pad * (high - low);
  return [zero && low === 0 ? 0 : low - room, zero && high === 0 ? 0 : high + room];
}

function tickTexts(ticks, kind) {
  const times = kind === "share" ? 100 : 1;
  const plain = ticks.map((t) => {
    const v = Number((times * t).toPrecision(8));
    if (v !== 0 && (Math.abs(v) < 1e-4 || Math.abs(v) >= 1e7)) return significantText(v, 1);
    return fixedText(v, Math.min(6, (String(Math.abs(v)).split(".")[1] || "").length));
  });
  return kind === "share" ? plain.map((t) => `${t}%`) : plain;
}
