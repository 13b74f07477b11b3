// Line plots as SVG: an axis, a line, the band between the lowest and the highest value, a cursor
// that follows the pointer and the arrow keys, and the same figures as a table.

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 56, RIGHT = 12, TOP = 10, BOTTOM = 26;
const TABLE_ROWS = 40;

function shape(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  parent.append(made);
  return made;
}

// About `count` round numbers that lie between low and high.
export function ticks(low, high, count) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough);
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step / 1e6; tick += step) found.push(tick);
  return found;
}

export function compact(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  for (const [unit, scale] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (size >= 10 * scale || (size >= scale && scale > 1e3)) return `${trimmed(value / scale)} ${unit}`;
  }
  return size >= 1000 ? value.toFixed(0) : trimmed(value);
}

function trimmed(value) {
  return String(Number(value.toPrecision(4)));
}

export class Plot {
  // `read` gives a point's {x, label, value, low, high}; value may be null.
  constructor(root, title, unit, read, fromZero = false) {
    this.read = read;
    this.fromZero = fromZero;
    this.unit = unit;
    this.title = title;
    this.points = [];
    this.at = null;
    this.svg = shape("svg", { role: "img", tabindex: 0, "aria-label": `${title}: nothing yet` }, root);
    this.output = document.createElement("output");
    this.details = document.createElement("details");
    const summary = document.createElement("summary");
    summary.textContent = `${title} as a table`;
    this.table = document.createElement("div");
    this.table.className = "scroll";
    this.table.tabIndex = 0;
    this.table.setAttribute("role", "region");
    this.table.setAttribute("aria-label", `${title} as a table`);
    this.details.append(summary, this.table);
    root.append(this.output, this.details);
    this.details.addEventListener("toggle", () => this.fillTable());
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.move(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("blur", () => this.move(null));
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  show(points) {
    this.points = points.map(this.read).filter((point) => point.value !== null);
    if (this.at !== null) this.at = Math.min(this.at, this.points.length - 1);
    this.draw();
    this.fillTable();
  }

  draw() {
    this.svg.replaceChildren();
    const width = this.svg.clientWidth || 600, height = this.svg.clientHeight || 240;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    if (this.points.length === 0) {
      const text = shape("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, this.svg);
      text.textContent = "no step has been made yet";
      return;
    }
    const last = this.points[this.points.length - 1];
    this.svg.setAttribute("aria-label",
      `${this.title} over ${this.points.length} points; the last, ${last.label}, is ${compact(last.value)} ${this.unit}. ` +
      "Arrow keys read single points.");
    this.scale(width, height);
    this.axes(width, height);
    const line = this.points.map((point) => `${this.x(point.x)},${this.y(point.value)}`);
    const top = this.points.map((point) => `${this.x(point.x)},${this.y(point.high)}`);
    const bottom = this.points.map((point) => `${this.x(point.x)},${this.y(point.low)}`).reverse();
    shape("polygon", { points: [...top, ...bottom].join(" "), class: "band" }, this.svg);
    shape("polyline", { points: line.join(" "), class: "line" }, this.svg);
    if (this.points.length === 1) {
      shape("circle", { cx: this.x(last.x), cy: this.y(last.value), r: 4, class: "dot" }, this.svg);
    }
    this.cursor = shape("g", {}, this.svg);
    this.drawCursor(height);
  }

  scale(width, height) {
    const first = this.points[0].x, last = this.points[this.points.length - 1].x;
    const lows = this.points.map((point) => point.low), highs = this.points.map((point) => point.high);
    let low = Math.min(...lows), high = Math.max(...highs);
    const margin = (high - low || Math.abs(high) || 1) * 0.06;
    if (this.fromZero) low = 0;
    else low = low >= 0 ? Math.max(0, low - margin) : low - margin;
    high += margin;
    this.low = low;
    this.high = high;
    this.first = first;
    this.last = last;
    this.x = (x) => LEFT + (last > first ? (x - first) / (last - first) : 0.5) * (width - LEFT - RIGHT);
    this.y = (y) => TOP + (1 - (y - low) / (high - low)) * (height - TOP - BOTTOM);
  }

  axes(width, height) {
    for (const tick of ticks(this.low, this.high, 4)) {
      const y = this.y(tick);
      shape("line", { x1: LEFT, x2: width - RIGHT, y1: y, y2: y, class: "axis" }, this.svg);
      const text = shape("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, this.svg);
      text.textContent = compact(tick);
    }
    for (const tick of ticks(this.first, this.last, Math.max(2, Math.floor(width / 80)))) {
      if (!Number.isInteger(tick)) continue;
      const text = shape("text", { x: this.x(tick), y: height - 8, "text-anchor": "middle" }, this.svg);
      text.textContent = compact(tick);
    }
  }

  drawCursor(height) {
    this.cursor.replaceChildren();
    const point = this.at === null ? null : this.points[this.at];
    this.output.textContent = point ? `${point.label}: ${compact(point.value)} ${this.unit}` : "";
    if (!point) return;
    const x = this.x(point.x);
    shape("line", { x1: x, x2: x, y1: TOP, y2: height - BOTTOM, class: "cursor" }, this.cursor);
    shape("circle", { cx: x, cy: this.y(point.value), r: 5, class: "dot" }, this.cursor);
  }

  move(index) {
    this.at = index;
    if (this.points.length) this.drawCursor(this.svg.clientHeight || 240);
  }

  point(event) {
    if (!this.points.length) return;
    const at = event.clientX - this.svg.getBoundingClientRect().left;
    let best = 0;
    this.points.forEach((point, index) => {
      if (Math.abs(this.x(point.x) - at) < Math.abs(this.x(this.points[best].x) - at)) best = index;
    });
    this.move(best);
  }

  key(event) {
    const end = this.points.length - 1;
    const from = this.at ?? end + 1;
    const target = { ArrowLeft: Math.max(0, from - 1), ArrowRight: Math.min(end, this.at === null ? 0 : from + 1),
      Home: 0, End: end, Escape: null }[event.key];
    if (target === undefined || end < 0) return;
    event.preventDefault();
    this.move(target);
  }

  fillTable() {
    if (!this.details.open) return;
    const every = Math.max(1, Math.ceil(this.points.length / TABLE_ROWS));
    const rows = this.points.filter((_, index) => (this.points.length - 1 - index) % every === 0).reverse();
    const table = document.createElement("table");
    const head = table.createTHead().insertRow();
    for (const title of ["Step", `${this.title}, ${this.unit}`]) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = title;
      head.append(cell);
    }
    const body = table.createTBody();
    for (const point of rows) {
      const row = body.insertRow();
      row.insertCell().textContent = point.label;
      row.insertCell().textContent = compact(point.value);
    }
    this.table.replaceChildren(table);
  }
}
