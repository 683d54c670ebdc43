// Two audits: hollow marks are before, filled marks after.

const BEFORE = { name: "Before", colour: "c2", shape: "circle", hollow: true };
const AFTER = { name: "After", colour: "c1", shape: "circle" };

function union(...lists) {
  return [...new Set(lists.flat())];
}

// A row with both marks; `of` maps an audit to {x, low, high} or nothing.
function pairRow(label, audits, of, text) {
  const [old, now] = audits.map((a) => of(a) || { x: null });
  const both = isNumber(old.x) && isNumber(now.x);
  return {
    label,
    join: true,
    size: isNumber(now.x) ? Math.abs(now.x) : -1,
    change: both ? Math.abs(now.x - old.x) : -1,
    marks: [{ ...old, series: BEFORE }, { ...now, series: AFTER }],
    lines: [
      ["Before", text(old)], ["After", text(now)],
      ["Difference", both ? text({ x: now.x - old.x }) : MISSING],
    ],
  };
}

// Where not all rows are drawn at once, those that changed most come first.
function mostChanged(rows, most) {
  const order = rows.length > most ? [...rows].sort((a, b) => b.change - a.change) : rows;
  return { rows: order, most, first: "those that changed most" };
}

function withInterval(kind) {
  return ({ x, low, high }) => {
    if (!isNumber(low) || !isNumber(high)) return format[kind](x);
    return `${format[kind](x)} (${format[kind](low)} to ${format[kind](high)})`;
  };
}

function compareLove(audits) {
  return (canvas, keys, index, title) => {
    const parts = audits.map((a) => a.balance || { groups: [], lines: [] });
    const names = union(parts[1].lines.map((x) => x.name), parts[0].lines.map((x) => x.name));
    let draw = () => {};
    legend(keys, [BEFORE, AFTER]);
    const chosen = chooser(keys, union(parts[1].groups, parts[0].groups), "Group", () => draw());
    const lines = parts.map((p) => new Map(p.lines.map((x) => [x.name, x])));
    const smd = (name) => (k) => {
      const line = lines[k].get(name);
      const cell = line && line.groups[chosen.name];
      return cell ? { x: cell.smd } : null;
    };
    draw = rowsDrawing(canvas, () => ({
      title, refs: [-0.1, 0.1], first: "the largest differences now",
      x: { label: "Difference from the population (standard deviations)", kind: "number", zero: true },
      rows: names.map((name) => pairRow(name, [0, 1], smd(name), withInterval("fixed")))
        .sort((a, b) => b.size - a.size),
    }));
    return draw;
  };
}

function compareRates(audits, paired) {
  return (canvas, keys, index, title) => {
    const [column, pairs] = paired[index];
    const lines = audits.map((a) => (a.rates.find((p) => p.column === column) || { lines: [] }).lines);
    const rate = (levels) => (k) => {
      const line = lines[k].find((x) => x.level === levels[k]);
      return line ? { x: line.rate } : null;
    };
    legend(keys, [BEFORE, AFTER]);
    const rows = pairs.map(([label, ...levels]) =>
      pairRow(label, [0, 1], rate(levels), withInterval("share")));
    const x = { label: "Share of rows with a reply", kind: "share", zero: true };
    return rowsDrawing(canvas, () => ({ title, x, ...mostChanged(rows, FEW) }));
  };
}

function compareCoefficients(audits) {
  const stages = union(...[1, 0].map((k) => audits[k].stages.map((s) => s.stage)));
  return (canvas, keys, index, title) => {
    const lists = audits.map((a) => {
      const stage = a.stages.find((s) => s.stage === stages[index]);
      return new Map((stage ? stage.coefficients : []).map((c) => [c.name, c]));
    });
    const value = (name) => (k) => {
      const c = lists[k].get(name);
      if (!c) return null;
      const wide = isNumber(c.p_value) ? 1.96 * c.standard_error : null;
      return { x: c.value, low: wide === null ? null : c.value - wide, high: wide === null ? null : c.value + wide };
    };
    legend(keys, [BEFORE, AFTER]);
    const names = union([...lists[1].keys()], [...lists[0].keys()]);
    const rows = names.map((name) => ({ ...pairRow(name, [0, 1], value(name), withInterval("number")), join: false }));
    const x = { label: "Coefficient (log odds)", kind: "number", zero: true };
    return rowsDrawing(canvas, () => ({ title, x, dodge: true, ...mostChanged(rows, MANY) }));
  };
}

function compareMetric(audits) {
  const names = { plain: "Plain mean", "horvitz-thompson": "Horvitz–Thompson", hajek: "Hájek", greg: "GREG" };
  return (canvas, keys, index, title) => {
    const lists = audits.map((a) => (a.metric ? a.metric.estimates : []));
    const of = (key) => union(...[1, 0].map((k) => lists[k].map((e) => e[key])));
    const estimators = of("estimator");
    let draw = () => {};
    legend(keys, [BEFORE, AFTER]);
    const words = estimators.map((e) => names[e] || e);
    const chosen = chooser(keys, words, "Estimator", () => draw());
    const estimate = (group) => (k) => {
      const estimator = estimators[words.indexOf(chosen.name)];
      const e = lists[k].find((one) => one.group === group && one.estimator === estimator);
      return e ? { x: e.estimate, low: e.low, high: e.high } : null;
    };
    const { name } = audits[1].metric || audits[0].metric;
    draw = rowsDrawing(canvas, () => ({
      title, dodge: true, x: { label: capital(name), kind: "number" },
      ...mostChanged(of("group").map((g) => ({
        ...pairRow(g, [0, 1], estimate(g), withInterval("number")), join: false,
      })), MANY),
    }));
    return draw;
  };
}

const audits = [data("audit-before"), data("audit-after")];
start({
  love: compareLove(audits), rates: compareRates(audits, data("paired-rates")),
  coefficients: compareCoefficients(audits), metric: compareMetric(audits),
});
