// Heat maps: rates by hour and group, in a ramp that stays ordered for every kind of eye.

const CIVIDIS = [
  [0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115], [138, 134, 120],
  [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56],
];

function rampColour(share) {
  const place = Math.max(0, Math.min(1, share)) * (CIVIDIS.length - 1);
  const k = Math.min(CIVIDIS.length - 2, Math.floor(place));
  const mixed = CIVIDIS[k].map((v, c) => Math.round(v + (place - k) * (CIVIDIS[k + 1][c] - v)));
  return `rgb(${mixed.join(",")})`;
}

function hatching(root, id) {
  const pattern = make("pattern", { id, width: 6, height: 6, patternUnits: "userSpaceOnUse" }, root);
  make("rect", { width: 6, height: 6, class: "hatch-ground" }, pattern);
  make("path", { d: "M-1,1l2,-2M0,6l6,-6M5,7l2,-2", class: "hatch" }, pattern);
  return `url(#${id})`;
}

function heatMap(host, spec) {
  const width = Math.max(200, Math.floor(host.clientWidth));
  const left = labelRoom(spec.levels, width, 0.28) + 10;
  const tall = 26;
  const bottom = 4 + spec.levels.length * tall;
  const chart = frame(host, bottom + 92, spec.title);
  const hatch = hatching(make("defs", {}, chart.root), `hatch-${spec.index}`);
  const cell = (chart.width - left - 4) / spec.hours.length;
  const known = spec.rate.flat().filter(isNumber);
  const [low, high] = known.length ? [Math.min(...known), Math.max(...known)] : [0, 1];
  spec.levels.forEach((level, r) => {
    write(chart.root, left - 8, 4 + (r + 0.5) * tall + 4, shortened(level, left - 12, 13), "name", "end");
    spec.hours.forEach((hour, h) => {
      const rate = spec.rate[r][h];
      const box = [left + h * cell, 4 + r * tall, left + (h + 1) * cell, 4 + (r + 1) * tall];
      make("rect", {
        x: box[0] + 0.5, y: box[1] + 0.5, width: Math.max(1, cell - 1), height: tall - 1, rx: 1.5,
        class: isNumber(rate) ? "mark cell" : "mark cell hidden-cell",
        fill: isNumber(rate) ? rampColour((rate - low) / (high - low || 1)) : hatch,
      }, chart.root);
      chart.spot(box, heatLines(spec, r, h));
    });
  });
  const every = [1, 2, 3, 4, 6, 12, 24, 48].find((n) => n * cell >= 24) || spec.hours.length;
  spec.hours.forEach((hour, h) => {
    if (h % every === 0) write(chart.root, left + (h + 0.5) * cell, bottom + 16, String(hour), "tick", "middle");
  });
  write(chart.root, (left + chart.width) / 2, bottom + 35, capital(spec.clock), "label", "middle");
  heatKey(chart, bottom + 52, [low, high], hatch, left);
}

function heatLines(spec, r, h) {
  const rate = spec.rate[r][h];
  const title = `${spec.levels[r]}, ${spec.clock} ${spec.hours[h]}`;
  if (!isNumber(rate)) return [title, ["Reply rate", "hidden: too few rows"]];
  return [title, ["Reply rate", format.share(rate)], ["Rows", format.count(spec.rows[r][h])]];
}

function heatKey(chart, top, [low, high], hatch, left) {
  const long = Math.min(220, chart.width - left - 104);
  const x = Math.min(left, chart.width - long - 104);
  for (let k = 0; k < 40; k += 1) {
    make("rect", {
      x: x + (k * long) / 40, y: top, width: long / 40 + 0.6, height: 10, class: "key",
      fill: rampColour((k + 0.5) / 40),
    }, chart.root);
  }
  write(chart.root, x, top + 26, format.share(low), "tick", "start");
  write(chart.root, x + long, top + 26, format.share(high), "tick", "end");
  if (long > 150) write(chart.root, x + long / 2, top + 26, "Reply rate", "tick", "middle");
  make("rect", { x: x + long + 20, y: top, width: 16, height: 10, fill: hatch, class: "key hidden-cell" }, chart.root);
  write(chart.root, x + long + 42, top + 9, "Too few", "tick", "start");
}
