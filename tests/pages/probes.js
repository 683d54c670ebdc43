// Questions to a page: which texts are hard to read, which overlap, which are too small.

function shown(element) {
  if (!element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) return false;
  return !element.closest(".sr, caption, script, style, noscript");
}

function textNodes() {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (node.textContent.trim() && shown(node.parentElement)) found.push(node);
  }
  return found;
}

const canvas = document.createElement("canvas");
canvas.width = canvas.height = 1;
const brush = canvas.getContext("2d", { willReadFrequently: true });

function rgba(colour) {
  brush.clearRect(0, 0, 1, 1);
  brush.fillStyle = colour;
  brush.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = brush.getImageData(0, 0, 1, 1).data;
  return [r, g, b, a / 255];
}

function over(front, back) {
  const a = front[3] + back[3] * (1 - front[3]);
  const mixed = [0, 1, 2].map((k) => (front[k] * front[3] + back[k] * back[3] * (1 - front[3])) / (a || 1));
  return [...mixed, a];
}

function background(element) {
  let colour = [0, 0, 0, 0];
  for (let e = element; e && colour[3] < 0.999; e = e.parentElement) {
    colour = over(colour, rgba(getComputedStyle(e).backgroundColor));
  }
  const dark = matchMedia("(prefers-color-scheme: dark)").matches && !matchMedia("print").matches;
  return over(colour, dark ? [18, 18, 18, 1] : [255, 255, 255, 1]);
}

function luminance(colour) {
  const [r, g, b] = colour.slice(0, 3).map((v) => {
    const s = v / 255;
    return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function opacity(element) {
  let product = 1;
  for (let e = element; e; e = e.parentElement) product *= Number(getComputedStyle(e).opacity);
  return product;
}

function contrast(element) {
  const style = getComputedStyle(element);
  const inside = element instanceof SVGElement;
  const front = rgba(inside ? style.fill : style.color);
  front[3] *= opacity(element);
  const back = background(element);
  const [a, b] = [luminance(over(front, back)), luminance(back)];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}

function lowContrast(least) {
  const known = new Map();
  const poor = [];
  const nodes = textNodes();
  for (const node of nodes) {
    const e = node.parentElement;
    const style = getComputedStyle(e);
    const key = `${style.color}|${style.fill}|${e instanceof SVGElement}|${opacity(e)}|${background(e)}`;
    if (!known.has(key)) known.set(key, contrast(e));
    if (known.get(key) < least) poor.push([node.textContent.slice(0, 40), known.get(key)]);
  }
  return { poor, texts: nodes.length, kinds: known.size };
}

function smallTexts(least) {
  return textNodes()
    .filter((node) => parseFloat(getComputedStyle(node.parentElement).fontSize) < least)
    .map((node) => node.textContent.slice(0, 40));
}

function crossing(a, b, slack) {
  return a.left < b.right - slack && b.left < a.right - slack && a.top < b.bottom - slack && b.top < a.bottom - slack;
}

// Texts of a plot that lie over each other, over a mark, or outside it.
function clashes() {
  const found = [];
  for (const svg of document.querySelectorAll(".canvas svg")) {
    const name = svg.closest("figure").id;
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].map((t) => [t.textContent, t.getBoundingClientRect()]);
    const marks = [...svg.querySelectorAll("path.mark:not(.area), rect.mark")].map((m) => m.getBoundingClientRect());
    texts.forEach(([text, box], k) => {
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1) {
        found.push([name, "outside", text]);
      }
      for (const [other, place] of texts.slice(k + 1)) {
        if (crossing(box, place, 2)) found.push([name, "text", text, other]);
      }
      if (marks.some((m) => crossing(box, m, 3))) found.push([name, "mark", text]);
    });
  }
  return found;
}
