// The charts: rows of marks or bars, lines and points over x, histograms, heat maps.

const LINE = 18; // height of a line of labels
const MANY = 40; // rows shown before a button asks for the rest
const FEW = 12; // of levels of a column, or of groups with several marks each

// As many ticks as fit without touching.
function fittingTicks(at, axis) {
  const length = Math.abs(at(at.domain[1]) - at(at.domain[0]));
  let best = { ticks: [], texts: [] };
  for (let wanted = Math.min(10, Math.floor(length / 56)); wanted >= 1; wanted -= 1) {
    let ticks = at.ticks(wanted);
    if (axis.whole) ticks = ticks.filter(Number.isInteger);
    const texts = tickTexts(ticks, axis.kind);
    const widths = texts.map((t) => textWidth(t) + 10);
    const clear = ticks.every((t, k) => !k || at(t) - at(ticks[k - 1]) >= (widths[k] + widths[k - 1]) / 2);
    if (clear && ticks.length > best.ticks.length) best = { ticks, texts };
    if (clear && ticks.length > 1) break;
  }
  return best;
}

function axisBelow(chart, at, y, axis, top) {
  const { ticks, texts } = fittingTicks(at, axis);
  ticks.forEach((tick, k) => {
    const x = at(tick);
    make("path", { d: `M${x},${top}V${y}`, class: "grid" }, chart.root);
    const half = textWidth(texts[k]) / 2;
    write(chart.root, Math.min(x, chart.width - half - 1), y + 16, texts[k], "tick", "middle");
  });
  if (axis.label) {
    const middle = (at(at.domain[0]) + at(at.domain[1])) / 2;
    const text = shortened(axis.label, chart.width - 8);
    const half = textWidth(text) / 2;
    const x = Math.max(half + 2, Math.min(middle, chart.width - half - 2));
    write(chart.root, x, y + 36, text, "label", "middle");
  }
}

function axisLeft(chart, at, x, right, axis) {
  const wanted = Math.max(2, Math.floor(Math.abs(at(at.domain[1]) - at(at.domain[0])) / 40));
  const ticks = at.ticks(wanted);
  const texts = tickTexts(ticks, axis.kind);
  ticks.forEach((tick, k) => {
    make("path", { d: `M${x},${at(tick)}H${right}`, class: "grid" }, chart.root);
    write(chart.root, x - 8, at(tick) + 4, texts[k], "tick", "end");
  });
}

// Width for labels on the left: as wide as the widest, but at most a part of the plot.
function labelRoom(labels, width, most = 0.36) {
  return Math.ceil(Math.min(most * width, Math.max(...labels.map((t) => textWidth(t, 13))) + 4));
}

function whisker(parent, at, y, low, high, colour) {
  const [a, b] = [at(low), at(high)];
  make("path", { d: `M${a},${y}H${b}M${a},${y - 3}v6M${b},${y - 3}v6`, class: `whisker ${colour}` }, parent);
}

// Where rows and their labels go. On a narrow screen long labels stand above their row.
function rowLayout(rows, spec, width) {
  const room = labelRoom(rows.map((r) => r.label), width);
  const stacked = width < 480 && room > 0.24 * width;
  const slots = spec.dodge ? Math.max(...rows.map((r) => r.marks.length)) : 1;
  const band = slots > 1 ? slots * 14 + 12 : spec.dodge ? 36 : 24;
  const ends = spec.bars ? Math.ceil(Math.max(...rows.map((r) => textWidth(r.end)))) + 12 : 14;
  const lift = stacked ? LINE + 2 : 0;
  return { left: stacked ? 12 : room + 12, right: width - ends, stacked, lift, tall: band + lift, band };
}

// spec: {rows: [{label, lines, marks: [{x, low, high, series}]}], x, refs, dodge, bars, title, most}
function rowsChart(host, spec, all, more) {
  const rows = all ? spec.rows : spec.rows.slice(0, spec.most || MANY);
  const place = rowLayout(rows, spec, Math.max(200, Math.floor(host.clientWidth)));
  const { left, right, tall } = place;
  const bottom = 10 + rows.length * tall;
  const chart = frame(host, bottom + (spec.x.label ? 44 : 24), spec.title);
  const values = rows.flatMap((r) => r.marks.flatMap((m) => [m.x, m.low, m.high]));
  const domain = extent([...values, ...(spec.refs || [])], { zero: spec.x.zero, pad: spec.bars ? 0 : 0.05 });
  const at = scale(domain, [left, right]);
  axisBelow(chart, at, bottom, spec.x, 4);
  if (spec.x.zero && domain[0] <= 0) make("path", { d: `M${at(0)},4V${bottom}`, class: "zero" }, chart.root);
  for (const ref of spec.refs || []) {
    make("path", { d: `M${at(ref)},4V${bottom}`, class: "ref" }, chart.root);
  }
  rows.forEach((row, k) => {
    const top = 10 + k * tall;
    const middle = top + place.lift + place.band / 2;
    if (place.stacked) {
      if (k) make("path", { d: `M0,${top}H${chart.width}`, class: "grid" }, chart.root);
      write(chart.root, 4, top + 14, shortened(row.label, chart.width - 12, 13), "name halo");
    } else write(chart.root, left - 12, middle + 4, shortened(row.label, left - 14, 13), "name", "end");
    (spec.bars ? drawBar : drawMarks)(chart, at, middle, row, spec.dodge);
    chart.spot([2, top + 2, chart.width - 2, top + tall - 2], [row.label, ...row.lines]);
  });
  chart.reach = 8;
  if (!all && rows.length < spec.rows.length) {
    const shown = `${format.count(rows.length)} of ${format.count(spec.rows.length)} are drawn: ${spec.first || "the first"}.`;
    html("p", "part", shown, host);
    const button = html("button", "more", `Show all ${format.count(spec.rows.length)} rows`, host);
    button.type = "button";
    button.addEventListener("click", more);
  }
}

function drawBar(chart, at, middle, row) {
  const [mark] = row.marks;
  const zero = at(Math.max(0, at.domain[0]));
  make("rect", {
    x: zero, y: middle - 8, width: Math.max(1, at(mark.x) - zero), height: 16, rx: 2,
    class: `mark bar ${mark.series.colour}`,
  }, chart.root);
  write(chart.root, chart.width - 4, middle + 4, row.end, "end", "end");
}

function drawMarks(chart, at, middle, row, dodge) {
  const shown = row.marks.filter((m) => isNumber(m.x));
  row.marks.forEach((mark, k) => {
    if (!isNumber(mark.x)) return;
    const y = dodge ? middle + (k - (row.marks.length - 1) / 2) * 14 : middle;
    if (isNumber(mark.low) && isNumber(mark.high)) {
      whisker(chart.root, at, y, mark.low, mark.high, mark.series.colour);
    }
    if (row.join && k === 0 && shown.length > 1) {
      const d = `M${at(shown[0].x)},${y}H${at(shown[1].x)}`;
      make("path", { d, class: `join ${mark.series.colour}` }, chart.root);
    }
    symbol(chart.root, at(mark.x), y, mark.series);
  });
}

// Rows that open when asked: returns the function that draws them.
function rowsDrawing(host, specOf) {
  let all = false;
  const draw = () => rowsChart(host, specOf(), all, () => {
    all = true;
    draw();
    host.querySelector("svg").focus({ preventScroll: true });
  });
  return draw;
}

// spec: {title, x, panels: [{y, series: [{name, colour, dash, line, points, band}], refs, diagonal}], spots}
function xyChart(host, spec) {
  const width = Math.max(200, Math.floor(host.clientWidth));
  const high = spec.high || Math.round(Math.min(260, Math.max(190, width * 0.5)));
  const step = high + 52;
  const chart = frame(host, 30 + (spec.panels.length - 1) * step + high + 42, spec.title);
  const axes = spec.panels.map((panel, k) => panelScale(panel, 30 + k * step, high));
  const wide = Math.max(...axes.map(({ at, panel }) => Math.max(
    ...tickTexts(at.ticks(Math.max(2, Math.floor(high / 40))), panel.y.kind).map((t) => textWidth(t, 12)),
  )));
  const [left, right] = [Math.ceil(wide) + 14, chart.width - 14];
  const at = { x: scale(spec.x.domain, [left, right], spec.x.log), left, right };
  axes.forEach(({ panel, at: y, top }) => {
    const last = panel === spec.panels[spec.panels.length - 1];
    write(chart.root, 2, top - 12, shortened(panel.y.label, chart.width - 4), "label");
    axisBelow(chart, at.x, top + high, last ? spec.x : { ...spec.x, label: "" }, top);
    axisLeft(chart, y, left, right, panel.y);
    drawPanel(chart, panel, at, y, [top, top + high]);
  });
  for (const spot of spec.spots) placeSpot(chart, spec, spot, at, axes, high);
  chart.reach = 60;
}

function panelScale(panel, top, high) {
  const { log } = panel.y;
  const values = [...(panel.refs || [])];
  for (const series of panel.series) {
    for (const p of series.points) values.push(p.y, p.low, p.high);
  }
  const domain = panel.y.domain || extent(values, { zero: panel.y.zero, log, pad: 0.06 });
  return { panel, top, at: scale(domain, [top + high, top], log) };
}

function placeSpot(chart, spec, spot, at, axes, high) {
  const x = at.x(spot.x);
  if (spot.y !== undefined) {
    const y = axes[0].at(spot.y);
    chart.spot([x - 4, y - 4, x + 4, y + 4], spot.lines);
  } else {
    const bottom = axes[axes.length - 1].top + high;
    chart.spot([x, axes[0].top, x, bottom], spot.lines);
  }
}

function drawPanel(chart, panel, at, y, [top, bottom]) {
  const { root } = chart;
  const inside = (v) => isNumber(v) && (!panel.y.log || v > 0);
  if (panel.diagonal) {
    const [low, high] = [Math.max(at.x.domain[0], y.domain[0]), Math.min(at.x.domain[1], y.domain[1])];
    make("path", { d: `M${at.x(low)},${y(low)}L${at.x(high)},${y(high)}`, class: "ref" }, root);
  }
  for (const ref of panel.refs || []) {
    make("path", { d: `M${at.left},${y(ref)}H${at.right}`, class: "ref" }, root);
  }
  for (const ref of panel.uprights || []) {
    make("path", { d: `M${at.x(ref)},${top}V${bottom}`, class: "ref" }, root);
  }
  for (const series of panel.series.filter((s) => s.band)) drawBand(root, series, at.x, y, inside);
  for (const series of panel.series) drawSeries(root, series, at.x, y, inside);
}

function drawBand(root, series, x, y, inside) {
  for (const run of runs(series.points, (p) => inside(p.low) && inside(p.high))) {
    const up = run.map((p) => `${x(p.x)},${y(p.high)}`);
    const down = run.map((p) => `${x(p.x)},${y(p.low)}`).reverse();
    make("path", { d: `M${[...up, ...down].join("L")}Z`, class: `band ${series.colour}` }, root);
  }
}

function runs(points, keep) {
  const found = [[]];
  for (const p of points) {
    if (keep(p)) found[found.length - 1].push(p);
    else if (found[found.length - 1].length) found.push([]);
  }
  return found.filter((run) => run.length);
}

function drawSeries(root, series, x, y, inside) {
  const parts = runs(series.points, (p) => inside(p.y));
  if (series.line) {
    for (const run of parts.filter((r) => r.length > 1)) {
      const d = `M${run.map((p) => `${x(p.x).toFixed(1)},${y(p.y).toFixed(1)}`).join("L")}`;
      make("path", { d, class: `line ${series.colour} ${series.dash || ""}` }, root);
    }
  }
  const [first, last] = [series.points[0], series.points[series.points.length - 1]];
  const crowded = x(last.x) - x(first.x) < 8 * series.points.length;
  const dots = !series.line || (series.dots && !crowded);
  for (const run of parts) {
    if (!dots && run.length > 1) continue;
    for (const p of run) {
      if (!series.line && isNumber(p.low) && isNumber(p.high)) {
        const [a, b] = [y(p.low), y(p.high)];
        const d = `M${x(p.x)},${a}V${b}M${x(p.x) - 3},${a}h6M${x(p.x) - 3},${b}h6`;
        make("path", { d, class: `whisker ${series.colour}` }, root);
      }
      symbol(root, x(p.x), y(p.y), series, { r: series.line ? 2.2 : 4.5 });
    }
  }
}

// spec: {title, edges, log, groups: [{name, counts, series}], x, unit, refs}
function histogram(host, spec) {
  const width = Math.max(200, Math.floor(host.clientWidth));
  const high = Math.round(Math.min(240, Math.max(170, width * 0.45)));
  const chart = frame(host, high + 74, spec.title);
  const edges = drawnEdges(spec.edges, spec.log);
  const size = (k) => (spec.log ? Math.log(edges[k + 1] / edges[k]) : edges[k + 1] - edges[k]);
  const sizes = edges.slice(1).map((_, k) => size(k));
  const usual = [...sizes].sort((a, b) => a - b)[Math.floor(sizes.length / 2)];
  const heights = spec.groups.map((g) => {
    const sum = g.counts.reduce((a, b) => a + b, 0) || 1;
    return g.counts.map((c, k) => ((c / sum) * usual) / sizes[k]);
  });
  const y = scale([0, Math.max(...heights.flat(), 1e-9) * 1.05], [30 + high, 30]);
  const texts = tickTexts(y.ticks(Math.floor(high / 40)), "share");
  const left = Math.ceil(Math.max(...texts.map((t) => textWidth(t)))) + 14;
  const x = scale([edges[0], edges[edges.length - 1]], [left, chart.width - 14], spec.log);
  const even = sizes.every((s) => Math.abs(s / usual - 1) < 0.05);
  const per = spec.log ? `factor of ${format.tidy(Math.exp(usual))}` : format.tidy(usual);
  const unit = even ? "Share of the group per bin" : `Share of the group per ${per}`;
  write(chart.root, 2, 18, unit, "label");
  axisBelow(chart, x, 30 + high, spec.x, 30);
  axisLeft(chart, y, left, chart.width - 14, { kind: "share" });
  for (const ref of spec.refs || []) {
    make("path", { d: `M${x(ref)},30V${30 + high}`, class: "ref" }, chart.root);
  }
  spec.groups.forEach((group, g) => drawSteps(chart, group, heights[g], edges, x, y));
  spec.edges.slice(1).forEach((_, k) => {
    const ends = [spec.edges[k], spec.edges[k + 1]].map(format.tidy).join(" to ");
    const lines = spec.groups.map((g) => {
      const sum = g.counts.reduce((a, b) => a + b, 0) || 1;
      return [g.name, `${format.count(g.counts[k])} (${format.share(g.counts[k] / sum)})`];
    });
    chart.spot([x(edges[k]), 30, x(edges[k + 1]), 30 + high], [`${spec.unit} ${ends}`, ...lines]);
  });
}

function drawnEdges(edges, log) {
  if (!log || edges[0] > 0) return edges;
  const rest = edges.slice(1);
  return [(rest[0] * rest[0]) / (rest[1] || rest[0] * 2), ...rest];
}

function drawSteps(chart, group, heights, edges, x, y) {
  const d = [`M${x(edges[0])},${y(0)}`];
  heights.forEach((h, k) => d.push(`V${y(h).toFixed(1)}H${x(edges[k + 1]).toFixed(1)}`));
  d.push(`V${y(0)}Z`);
  const { colour, fill } = group.series;
  make("path", { d: d.join(""), class: `mark area ${colour} ${fill || ""}`, "data-bins": heights.length }, chart.root);
}
