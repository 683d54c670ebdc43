// The plots of an audit, from its JSON.

const GROUP_LOOKS = {
  enrolled: { colour: "c2", shape: "circle", hollow: true },
  respondents: { colour: "c4", shape: "square", hollow: true },
  "enrolled weighted": { colour: "c1", shape: "diamond" },
  "respondents weighted": { colour: "c3", shape: "up" },
};
const ESTIMATOR_LOOKS = {
  plain: { colour: "c2", shape: "circle", hollow: true },
  "horvitz-thompson": { colour: "c4", shape: "square" },
  hajek: { colour: "c1", shape: "diamond" },
  greg: { colour: "c3", shape: "up" },
};
const ESTIMATOR_NAMES = {
  plain: "Plain mean", "horvitz-thompson": "Horvitz–Thompson", hajek: "Hájek", greg: "GREG",
};
const OTHER_LOOKS = [
  { colour: "c5", shape: "down" }, { colour: "c6", shape: "circle" }, { colour: "c7", shape: "square" },
];

function looks(names, known, called = {}) {
  let others = 0;
  return names.map((name) => {
    const look = known[name] || OTHER_LOOKS[others++ % OTHER_LOOKS.length];
    return { name: called[name] || name, id: name, ...look };
  });
}

function smdOf(line, group) {
  const cell = line.groups[group];
  return cell && isNumber(cell.smd) ? cell.smd : null;
}

function loveSpec(balance, series, title) {
  const first = ["respondents", "enrolled"].find((g) => balance.groups.includes(g)) || balance.groups[0];
  const size = (line) => {
    const found = [first, ...balance.groups].map((g) => smdOf(line, g)).find(isNumber);
    return isNumber(found) ? Math.abs(found) : -1;
  };
  const lines = [...balance.lines].sort((a, b) => size(b) - size(a));
  return {
    title, first: "the largest differences",
    x: { label: "Difference from the population (standard deviations)", kind: "number", zero: true },
    refs: [-0.1, 0.1],
    rows: lines.map((line) => ({
      label: line.name,
      lines: series.map((s) => [s.name, format.fixed(smdOf(line, s.id))]),
      marks: series.map((s) => ({ x: smdOf(line, s.id), series: s })),
    })),
  };
}

function lovePlot(audit) {
  return (canvas, keys, index, title) => {
    const series = looks(audit.balance.groups, GROUP_LOOKS);
    let draw = () => {};
    const on = toggles(keys, series, () => draw());
    draw = rowsDrawing(canvas, () => loveSpec(audit.balance, series.filter((s) => on.has(s.name)), title));
    return draw;
  };
}

function weightPlot(audit) {
  return (canvas, keys, index, title) => {
    const { multiples } = audit.weights[index];
    const groups = Object.entries(multiples.counts).map(([name, counts], k) => ({
      name: "Count", counts, series: { colour: `c${1 + k}`, fill: "filled" },
    }));
    legend(keys, [{ name: "Weights", mark: "box", ...groups[0].series }, { name: "Mean weight", mark: "line", colour: "plain", dash: "dashed" }]);
    return () => histogram(canvas, {
      title, edges: multiples.edges, log: multiples.log_scale, groups, refs: [1],
      x: { label: `Weight, in multiples of the mean${multiples.log_scale ? " (log scale)" : ""}`, kind: "number" },
      unit: "Weight",
    });
  };
}

function overlapPlot(audit) {
  return (canvas, keys, index, title) => {
    const { prob, stage } = audit.stages[index];
    const styles = [{ colour: "plain", fill: "filled" }, { colour: "c1", fill: "tinted" }];
    const size = (counts) => counts.reduce((a, b) => a + b, 0);
    const larger = Object.entries(prob.counts).sort((a, b) => size(b[1]) - size(a[1]));
    const groups = larger.map(([name, counts], k) => ({
      name: capital(name), counts, series: styles[k] || { colour: `c${k}`, fill: "tinted" },
    }));
    legend(keys, groups.map((g) => ({ name: g.name, mark: "box", ...g.series })));
    return () => histogram(canvas, {
      title, edges: prob.edges, log: prob.log_scale, groups,
      x: { label: `Fitted probability of ${stage}${prob.log_scale ? " (log scale)" : ""}`, kind: "number" },
      unit: "Probability",
    });
  };
}

function roundedUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((m) => m * power).find((v) => v >= value * 0.9999);
}

function reliabilityPlot(audit) {
  return (canvas, keys, index, title) => {
    const { reliability } = audit.stages[index];
    const series = { name: "Observed, 95% interval", colour: "c1", shape: "circle" };
    legend(keys, [series, { name: "Perfect agreement", mark: "line", colour: "plain", dash: "dashed" }]);
    const points = reliability.map((r) => ({
      x: r.mean_prob, y: r.rate,
      low: Math.max(0, r.rate - 1.96 * r.standard_error), high: Math.min(1, r.rate + 1.96 * r.standard_error),
    }));
    const top = roundedUp(Math.max(...points.flatMap((p) => [p.x, p.high]).filter(isNumber)));
    const spots = reliability.map((r) => ({
      x: r.mean_prob, y: r.rate,
      lines: [
        `Mean probability ${format.fixed(r.mean_prob)}`, ["Share selected", format.fixed(r.rate)],
        ["Standard error", format.fixed(r.standard_error)], ["Count", format.count(r.count)],
      ],
    }));
    return () => xyChart(canvas, {
      title, spots, high: Math.min(300, Math.max(200, canvas.clientWidth - 80)),
      x: { label: "Mean fitted probability", kind: "number", domain: [0, top] },
      panels: [{
        y: { label: "Share selected", kind: "number", domain: [0, top] }, diagonal: true,
        series: [{ ...series, points }],
      }],
    });
  };
}

function ratesPlot(audit) {
  return (canvas, keys, index, title) => {
    const part = audit.rates[index];
    const { rows, replies } = audit.sizes;
    const overall = rows ? replies / rows : null;
    const series = { name: "Reply rate", colour: "c1", mark: "box", fill: "filled" };
    if (overall !== null) {
      legend(keys, [{ name: `All rows: ${format.share(overall)}`, mark: "line", colour: "plain", dash: "dashed" }]);
    }
    const many = part.lines.length > FEW;
    const lines = many ? [...part.lines].sort((a, b) => b.rows - a.rows) : part.lines;
    const spec = {
      title, bars: true, most: FEW, first: "the largest levels", refs: overall === null ? [] : [overall],
      x: { label: "Share of rows with a reply", kind: "share", zero: true },
      rows: lines.map((line) => ({
        label: line.level, end: format.share(line.rate), marks: [{ x: line.rate, series }],
        lines: [
          ["Reply rate", format.share(line.rate)], ["Replies", format.count(line.replies)],
          ["Rows", format.count(line.rows)],
        ],
      })),
    };
    return rowsDrawing(canvas, () => spec);
  };
}

function heatPlot(audit) {
  return (canvas, keys, index, title) => () => heatMap(canvas, { ...audit.heat[index], index, title });
}

function roundName(line) {
  return line.first === line.last ? `Round ${line.first}` : `Rounds ${line.first} to ${line.last}`;
}

function roundLines(line) {
  const lines = [roundName(line)];
  if (line.opened_at) lines.push(["Opened at", line.opened_at]);
  lines.push(
    ["Invited", format.count(line.invited)], ["Replies", format.count(line.replies)],
    ["Reply rate", format.share(line.reply_rate)], ["Expected rate", format.share(line.expected_rate)],
    ["Observed by expected", format.fixed(line.calibration_ratio)],
    ["Effective replies", format.count(line.effective_replies)],
  );
  if (isNumber(line.reliance)) lines.push(["Reliance on enrollment weights", format.fixed(line.reliance)]);
  if (line.skipped) lines.push(["Skipped rounds", format.count(line.skipped)]);
  return lines;
}

function roundPanels(rounds) {
  const middle = (line) => (line.first + line.last) / 2;
  const points = (key) => rounds.map((line) => ({ x: middle(line), y: line[key] }));
  const has = (key) => rounds.some((line) => isNumber(line[key]));
  const line = (name, key, look) => ({ name, ...look, line: true, dots: true, points: points(key) });
  const panels = [{
    y: { label: "Reply rate (share of enrolled)", kind: "share", zero: true },
    series: [line("Observed", "reply_rate", { colour: "c1" })],
  }];
  if (has("expected_rate")) {
    panels[0].series.push({ ...line("Expected", "expected_rate", { colour: "c2", dash: "dashed" }), dots: false });
  }
  if (has("calibration_ratio")) {
    panels.push({
      y: { label: "Observed by expected replies (ratio)", kind: "number" }, refs: [1],
      series: [line("Ratio", "calibration_ratio", { colour: "c1" })],
    });
  }
  if (has("effective_replies")) {
    panels.push({
      y: { label: "Effective replies (number)", kind: "number", zero: true },
      series: [line("Effective replies", "effective_replies", { colour: "c1" })],
    });
  }
  if (has("reliance")) {
    panels.push({
      y: { label: "Reliance on enrollment weights (0 to 1)", kind: "number", zero: true }, refs: [1],
      series: [line("Reliance", "reliance", { colour: "c1" })],
    });
  }
  return panels;
}

function roundsPlot(audit) {
  return (canvas, keys, index, title) => {
    const { rounds } = audit;
    const panels = roundPanels(rounds);
    legend(keys, panels[0].series.map(({ name, colour, dash }) => ({ name, colour, dash, mark: "line" })));
    const spots = rounds.map((line) => ({ x: (line.first + line.last) / 2, lines: roundLines(line) }));
    const ends = extent(rounds.flatMap((line) => [line.first, line.last]), { pad: 0 });
    return () => xyChart(canvas, {
      title, panels, spots, high: 120, x: { label: "Round", kind: "number", whole: true, domain: ends },
    });
  };
}

function estimateMark(estimate, series) {
  if (!estimate) return { x: null, series };
  return { x: estimate.estimate, low: estimate.low, high: estimate.high, series };
}

function estimateText(estimate) {
  if (!estimate) return MISSING;
  if (!isNumber(estimate.estimate)) return `${MISSING} ${estimate.reason}`.trim();
  if (!isNumber(estimate.low)) return format.number(estimate.estimate);
  return `${format.number(estimate.estimate)} (${format.number(estimate.low)} to ${format.number(estimate.high)})`;
}

function everyonePlot(audit) {
  return (canvas, keys, index, title) => {
    const { metric } = audit;
    const estimates = metric.estimates.filter((e) => e.group === "everyone");
    const series = looks(estimates.map((e) => e.estimator), ESTIMATOR_LOOKS, ESTIMATOR_NAMES);
    const rows = estimates.map((e, k) => ({
      label: series[k].name, marks: [estimateMark(e, series[k])],
      lines: [
        ["Estimate", estimateText(e)], ["Standard error", format.number(e.standard_error)],
        ["Effective size", format.count(e.effective_sample_size)],
      ],
    }));
    const x = { label: capital(metric.name), kind: "number" };
    return rowsDrawing(canvas, () => ({ title, rows, x, dodge: true }));
  };
}

function groupsPlot(audit) {
  return (canvas, keys, index, title) => {
    const { metric } = audit;
    const names = [...new Set(metric.estimates.map((e) => e.estimator))];
    const series = looks(names, ESTIMATOR_LOOKS, ESTIMATOR_NAMES);
    const found = new Map();
    for (const e of metric.estimates) {
      if (!found.has(e.group)) found.set(e.group, new Map());
      found.get(e.group).set(e.estimator, e);
    }
    const find = (group, id) => found.get(group).get(id);
    const clients = (group) => Math.max(...[...found.get(group).values()].map((e) => e.clients));
    const groups = [...found.keys()];
    if (groups.length > FEW + 1) groups.sort((a, b) => clients(b) - clients(a)); // everyone is first
    const spec = (shown) => ({
      title, dodge: true, most: FEW + 1, first: "groups of most clients", x: { label: capital(metric.name), kind: "number" },
      rows: groups.map((group) => ({
        label: group,
        lines: shown.map((s) => [s.name, estimateText(find(group, s.id))]),
        marks: shown.map((s) => estimateMark(find(group, s.id), s)),
      })),
    });
    let draw = () => {};
    const on = toggles(keys, series, () => draw());
    draw = rowsDrawing(canvas, () => spec(series.filter((s) => on.has(s.name))));
    return draw;
  };
}

function sensitivityPlot(audit) {
  return (canvas, keys, index, title) => {
    const { metric } = audit;
    const plain = metric.estimates.find((e) => e.group === "everyone" && e.estimator === "plain");
    const known = plain && isNumber(plain.estimate);
    const line = (name, key, colour, dash) => ({
      name, colour, dash, line: true, dots: true,
      points: metric.sensitivity.map((s) => ({ x: s.odds_ratio, y: s[key] })),
    });
    const band = {
      colour: "c1", band: true, points: metric.sensitivity.map((s) => ({ x: s.odds_ratio, y: null, low: s.low, high: s.high })),
    };
    const upright = isNumber(metric.plain_odds_ratio) ? [metric.plain_odds_ratio] : [];
    const ends = extent([...metric.sensitivity.map((s) => s.odds_ratio), ...upright], { log: true });
    legend(keys, [
      { name: "Bounds of the weighted mean", mark: "box", colour: "c1", fill: "tinted" },
      ...(known ? [{ name: `Plain mean${upright.length ? ", and where it is reached" : ""}`, mark: "line", colour: "plain", dash: "dashed" }] : []),
    ]);
    const spots = metric.sensitivity.map((s) => ({
      x: s.odds_ratio,
      lines: [`Odds ratio ${format.number(s.odds_ratio)}`, ["Low", format.number(s.low)], ["High", format.number(s.high)], ["Weight error", format.number(s.weight_error)]],
    }));
    return () => xyChart(canvas, {
      title, spots, x: { label: "Odds ratio Λ (log scale)", kind: "number", log: true, domain: ends },
      panels: [{
        y: { label: capital(metric.name), kind: "number" }, refs: known ? [plain.estimate] : [],
        uprights: upright, series: [band, line("Low", "low", "c1"), line("High", "high", "c1")],
      }],
    });
  };
}

const audit = data("audit-data");
start({
  love: lovePlot(audit), weight: weightPlot(audit), overlap: overlapPlot(audit),
  reliability: reliabilityPlot(audit), rates: ratesPlot(audit), heat: heatPlot(audit),
  rounds: roundsPlot(audit), everyone: everyonePlot(audit), groups: groupsPlot(audit),
  sensitivity: sensitivityPlot(audit),
});
