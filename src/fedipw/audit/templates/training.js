// Learning curves: lines with bands, from {curves: [{name, round, value, low, high}], y_label, log}.

const DASHES = ["", "dashed", "dash-dot", "dotted"];

function curveSeries(chart) {
  return chart.curves.map((curve, k) => ({
    name: curve.name, colour: `c${1 + (k % 7)}`, dash: DASHES[k % 4],
    mark: "line", line: true, band: Boolean(curve.low && curve.high), shape: "circle",
    points: curve.round.map((x, i) => ({
      x, y: curve.value[i], low: curve.low ? curve.low[i] : null, high: curve.high ? curve.high[i] : null,
    })),
  }));
}

// The rounds that a point stands for.
function roundsAt(x, each) {
  return each > 1 ? `Rounds ${x - (each - 1) / 2} to ${x + (each - 1) / 2}` : `Round ${x}`;
}

function curveSpots(series, each) {
  const rounds = [...new Set(series.flatMap((s) => s.points.map((p) => p.x)))].sort((a, b) => a - b);
  const byRound = series.map((s) => new Map(s.points.map((p) => [p.x, p])));
  const text = (p) => {
    if (!p) return MISSING;
    const inner = isNumber(p.low) && isNumber(p.high) ? ` (${format.number(p.low)} to ${format.number(p.high)})` : "";
    return format.number(p.y) + inner;
  };
  return rounds.map((x) => ({
    x, lines: [roundsAt(x, each), ...series.map((s, k) => [s.name, text(byRound[k].get(x))])],
  }));
}

function curvesPlot(charts) {
  return (canvas, keys, index, title) => {
    const chart = charts[index];
    const series = curveSeries(chart);
    let draw = () => {};
    const on = toggles(keys, series, () => draw());
    const label = chart.log ? `${chart.y_label} (log scale)` : chart.y_label;
    const ends = extent(series.flatMap((s) => s.points.map((p) => p.x)), { pad: 0 });
    draw = () => {
      const shown = series.filter((s) => on.has(s.name));
      xyChart(canvas, {
        title, spots: curveSpots(shown, chart.each || 1), high: Math.round(Math.min(320, Math.max(220, canvas.clientWidth * 0.45))),
        x: { label: "Round", kind: "number", whole: true, domain: ends },
        panels: [{ y: { label, kind: "number", log: Boolean(chart.log) }, series: shown }],
      });
    };
    return draw;
  };
}

start({ curves: curvesPlot(data("training-data")) });
