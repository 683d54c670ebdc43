// What every page shares: the tooltip, frames of plots, legends, tables that sort, the start.

// --- tooltip: one for the page ---

const tip = html("div", "tip", "", null);
tip.setAttribute("role", "status");
tip.hidden = true;
let teller = null; // the chart that the tooltip speaks for

function showTip(anchor, lines) {
  tip.replaceChildren();
  html("b", "", lines[0], tip);
  for (const [name, value] of lines.slice(1)) {
    const row = html("div", "tip-row", "", tip);
    html("span", "", name, row);
    html("span", "tip-value", value, row);
  }
  tip.hidden = false;
  const [w, h] = [tip.offsetWidth, tip.offsetHeight];
  const page = document.documentElement.clientWidth;
  const left = Math.max(8, Math.min(anchor.x - w / 2, page - w - 8));
  const above = anchor.y - h - 14;
  tip.style.left = `${left + window.scrollX}px`;
  tip.style.top = `${(above < 8 ? anchor.below : above) + window.scrollY}px`;
}

function hideTip() {
  tip.hidden = true;
  for (const node of document.querySelectorAll(".highlight")) node.remove();
}

// A frame is one SVG. A spot is a place in it with something to tell: a box and lines of text.
function frame(host, height, label) {
  const width = Math.max(200, Math.floor(host.clientWidth));
  const root = make("svg", {
    width, height, viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0,
    "aria-label": `${label}. Arrow keys read the values.`,
  });
  host.replaceChildren(root);
  const made = { root, width, height, spots: [], reach: 24, current: -1 };
  made.spot = (box, lines, node = null) => made.spots.push({ box, lines, node });
  listen(made);
  return made;
}

function distance([x0, y0, x1, y1], x, y) {
  return Math.hypot(Math.max(x0 - x, 0, x - x1), Math.max(y0 - y, 0, y - y1));
}

function tell(chart, index) {
  chart.current = index;
  const { box: [x0, y0, x1, y1], lines } = chart.spots[index];
  hideTip();
  teller = chart;
  const highlight = make("rect", {
    x: x0 - 3, y: y0 - 3, width: x1 - x0 + 6, height: y1 - y0 + 6, rx: 3, class: "highlight",
  });
  chart.root.prepend(highlight);
  const place = chart.root.getBoundingClientRect();
  const middle = place.left + (x0 + x1) / 2;
  showTip({ x: middle, y: place.top + y0, below: place.top + y1 + 14 }, lines);
}

function listen(chart) {
  const { root } = chart;
  const find = (event) => {
    const place = root.getBoundingClientRect();
    let best = -1;
    let least = chart.reach;
    chart.spots.forEach((spot, k) => {
      const d = distance(spot.box, event.clientX - place.left, event.clientY - place.top);
      if (d < least) [best, least] = [k, d];
    });
    if (best >= 0) tell(chart, best);
    else hideTip();
  };
  root.addEventListener("pointermove", find);
  root.addEventListener("pointerdown", find);
  root.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && hideTip());
  root.addEventListener("blur", () => teller === chart && hideTip());
  root.addEventListener("focus", () => {
    if (root.matches(":focus-visible") && chart.spots.length) tell(chart, Math.max(0, chart.current));
  });
  root.addEventListener("keydown", (event) => {
    const last = chart.spots.length - 1;
    const at = chart.current;
    const next = {
      ArrowRight: Math.min(at + 1, last), ArrowDown: Math.min(at + 1, last),
      ArrowLeft: Math.max(at - 1, 0), ArrowUp: Math.max(at - 1, 0), Home: 0, End: last,
    }[event.key];
    if (event.key === "Escape") hideTip();
    if (next === undefined || last < 0) return;
    event.preventDefault();
    tell(chart, next);
  });
}

// --- legends ---

function swatch(parent, series) {
  const svg = make("svg", { width: 22, height: 14, "aria-hidden": "true" }, parent);
  if (series.mark === "line") {
    make("path", { d: "M1,7H21", class: `line ${series.colour} ${series.dash || ""}` }, svg);
  } else if (series.mark === "box") {
    const style = `area ${series.colour} ${series.fill || ""}`;
    make("rect", { x: 4, y: 1.5, width: 14, height: 11, class: style }, svg);
  } else symbol(svg, 11, 7, series, { class: "key" });
}

function legend(host, series) {
  host.replaceChildren();
  for (const one of series) {
    const item = html("span", "item", "", host);
    swatch(item, one);
    html("span", "", one.name, item);
  }
}

// Buttons that turn series on and off; at least one stays on.
function toggles(host, series, redraw) {
  host.replaceChildren();
  const on = new Set(series.map((s) => s.name));
  for (const one of series) {
    const button = html("button", "item", "", host);
    button.type = "button";
    button.setAttribute("aria-pressed", "true");
    swatch(button, one);
    html("span", "", one.name, button);
    button.addEventListener("click", () => {
      if (!on.delete(one.name)) on.add(one.name);
      if (!on.size) on.add(one.name);
      button.setAttribute("aria-pressed", String(on.has(one.name)));
      redraw();
    });
  }
  return on;
}

// Buttons of which one is chosen.
function chooser(host, names, label, redraw) {
  const chosen = { name: names[0] };
  const box = html("div", "choices", "", host);
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", label);
  const buttons = names.map((name) => {
    const button = html("button", "item", name, box);
    button.type = "button";
    button.addEventListener("click", () => {
      chosen.name = name;
      mark();
      redraw();
    });
    return button;
  });
  const mark = () => buttons.forEach((b, k) => {
    b.setAttribute("aria-pressed", String(names[k] === chosen.name));
  });
  mark();
  return chosen;
}

// --- tables ---

// Rows beyond the first are data until all are asked for: by a button, a sort or a search.
function wholeTable(box) {
  const rest = box.querySelector("script");
  if (!rest) return;
  const { kinds, rows } = JSON.parse(rest.textContent);
  const body = box.querySelector("tbody");
  for (const values of rows) {
    const row = html("tr", "", "", body);
    values.forEach((value, k) => {
      const number = kinds[k] !== "text" && typeof value !== "string";
      const text = number ? format[kinds[k]](value) : value || MISSING;
      const cell = html(k ? "td" : "th", number ? "number" : "", text, row);
      if (!k) cell.scope = "row";
      if (number && value !== null) cell.dataset.v = value;
    });
  }
  rest.remove();
  box.querySelector(".rest").remove();
}

function followSearch(box) {
  const field = box.querySelector("input");
  if (!field) return;
  field.addEventListener("input", () => {
    wholeTable(box);
    const wanted = field.value.trim().toLowerCase();
    for (const row of box.querySelectorAll("tbody tr")) {
      const texts = Array.from(row.cells).filter((cell) => !cell.classList.contains("number"));
      row.hidden = !texts.some((cell) => cell.textContent.toLowerCase().includes(wanted));
    }
  });
}

function sortBy(head) {
  const table = head.closest("table");
  wholeTable(table.closest(".table"));
  const column = head.cellIndex;
  const rising = head.getAttribute("aria-sort") !== "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", rising ? "ascending" : "descending");
  const order = new Intl.Collator("en", { numeric: true });
  const numeric = head.classList.contains("number");
  const key = (row) => {
    const cell = row.cells[column];
    if (numeric) return cell.dataset.v === undefined ? null : Number(cell.dataset.v);
    return cell.textContent === MISSING ? null : cell.textContent;
  };
  const rows = Array.from(table.tBodies[0].rows, (row) => [key(row), row]);
  rows.sort(([a], [b]) => {
    if (a === null || b === null) return (a === null) - (b === null);
    const difference = numeric ? a - b : order.compare(a, b);
    return rising ? difference : -difference;
  });
  table.tBodies[0].append(...rows.map(([, row]) => row));
}

// --- the page ---

function data(id) {
  return JSON.parse(document.getElementById(id).textContent);
}

const drawings = [];

// `plots` maps the kind of a figure to a function of (canvas, legend, index) that returns `draw`.
function start(plots) {
  document.documentElement.classList.add("js");
  window.fedipw = { format };
  document.body.append(tip);
  for (const figure of document.querySelectorAll("figure[data-plot]")) {
    const canvas = figure.querySelector(".canvas");
    const keys = figure.querySelector(".legend");
    const title = figure.querySelector("h3").textContent;
    const redraw = plots[figure.dataset.plot](canvas, keys, Number(figure.dataset.index), title);
    drawings.push(redraw);
    redraw();
  }
  for (const button of document.querySelectorAll("th > button")) {
    button.addEventListener("click", () => sortBy(button.closest("th")));
  }
  for (const box of document.querySelectorAll(".table")) {
    followSearch(box);
    const more = box.querySelector(".rest button");
    if (more) more.addEventListener("click", () => wholeTable(box));
  }
  followSize();
}

function followSize() {
  let width = window.innerWidth;
  let waiting = 0;
  const redraw = () => {
    hideTip();
    for (const draw of drawings) draw();
  };
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(redraw);
  });
  const paper = (on) => {
    document.documentElement.classList.toggle("paper", on);
    redraw();
  };
  window.addEventListener("beforeprint", () => paper(true));
  window.addEventListener("afterprint", () => paper(false));
  window.matchMedia("print").addEventListener("change", (event) => paper(event.matches));
  document.addEventListener("pointerdown", (event) => {
    if (!event.target.closest(".canvas")) hideTip();
  });
}
