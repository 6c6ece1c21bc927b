import uPlot from "../vendor/uplot-1.6.32.esm.js";
import { sourcesOf, styleOf } from "./sources.js";

const FONT = "11px system-ui, sans-serif";
const TILE = 6;

/** A chart of uPlot in a box: it follows the box's size, and the colour scheme. */
class Chart {
  #box;
  #options;
  #plot = null;
  #data = [[]];

  constructor(box, options) {
    this.#box = box;
    this.#options = options;
    new ResizeObserver(() => this.#fit()).observe(box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#make());
  }

  /** Draw data; `isOther`: of other series than the last, which uPlot cannot exchange. */
  show(data, isOther = false) {
    this.#data = data;
    if (isOther) {
      this.#plot?.destroy();
      this.#plot = null;
    }
    if (this.#plot) this.#plot.setData(data);
    else this.#make();
  }

  #fit() {
    const { clientWidth: width, clientHeight: height } = this.#box;
    if (width === 0 || height === 0) return; // in a tab that is not shown
    if (this.#plot) this.#plot.setSize({ width, height });
    else this.#make();
  }

  #make() {
    const { clientWidth: width, clientHeight: height } = this.#box;
    if (width === 0 || height === 0) return;
    this.#plot?.destroy();
    this.#plot = new uPlot({ width, height, ...common(), ...this.#options(theme()) }, this.#data, this.#box);
  }
}

function common() {
  return { legend: { show: false }, cursor: { show: false }, padding: [6, 6, 0, 0] };
}

/** Return the colours of the page, as they are now. */
function theme() {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(`--${name}`).trim();
}

function axis(colour, more) {
  const line = { stroke: colour("line"), width: 1 };
  return { stroke: colour("muted"), font: FONT, grid: line, ticks: { ...line, size: 3 }, gap: 3, ...more };
}

/** Bars of tokens by source over time, stacked: `times` are the buckets' starts, `counts` by source. */
export class SourcesOverTime {
  #chart;
  #sources = sourcesOf({});

  constructor(box, bucketS) {
    const bars = uPlot.paths.bars({ size: [0.82, 30], align: 1 });
    this.#chart = new Chart(box, (colour) => ({
      scales: { x: { time: true, range: (_, low, high) => (low === null ? [0, 1] : [low, high + bucketS]) }, y: { range: (_, __, high) => [0, Math.max(high, 10)] } },
      axes: [
        axis(colour, { size: 18, space: 60, values: [[60, "{HH}:{mm}", null, null, null, null, null, null, 1], [1, "{HH}:{mm}:{ss}", null, null, null, null, null, null, 1]] }),
        axis(colour, { size: 40, space: 24, values: (_, marks) => marks.map((mark) => (mark >= 1000 ? `${mark / 1000}k` : mark)) }),
      ],
      series: [
        {},
        ...[...this.#sources].reverse().map((id) => ({
          paths: bars,
          points: { show: false },
          stroke: colour(`src-${styleOf(id)}`),
          width: 0,
          fill: () => pattern(id, colour),
        })),
      ],
    }));
  }

  /** Draw buckets `{t, tokens}`, the earliest first. */
  show(buckets) {
    const sums = buckets.map(() => 0);
    const sources = sourcesOf(Object.assign({}, ...buckets.map(({ tokens }) => tokens)));
    const isOther = sources.join() !== this.#sources.join();
    this.#sources = sources;
    const stacked = sources.map((id) => buckets.map(({ tokens }, place) => (sums[place] += tokens[id] ?? 0)));
    this.#chart.show([buckets.map(({ t }) => t), ...stacked.reverse()], isOther);
  }
}

/** Predicted against observed: points near the diagonal are honest forecasts. */
export class Calibration {
  #chart;

  constructor(box) {
    const unit = { time: false, range: [0, 1] };
    const shares = (_, marks) => marks.map((mark) => `${Math.round(mark * 100)}%`);
    this.#chart = new Chart(box, (colour) => ({
      scales: { x: unit, y: unit },
      axes: [
        axis(colour, { size: 18, space: 30, values: shares, splits: [0, 0.5, 1] }),
        axis(colour, { size: 38, space: 18, values: shares, splits: [0, 0.5, 1] }),
      ],
      padding: [8, 14, 0, 0],
      series: [
        {},
        { stroke: colour("muted"), width: 1, dash: [4, 4], points: { show: false } },
        { stroke: colour("accent"), width: 1.5, points: { show: true, size: 7, fill: colour("accent") } },
      ],
    }));
  }

  /** Draw points `[predicted, observed, turns]`, by rising prediction. */
  show(points) {
    const inside = points.filter(([x]) => x > 0 && x < 1);
    const x = [0, ...inside.map((point) => point[0]), 1];
    this.#chart.show([x, x, [null, ...inside.map((point) => point[1]), null]]);
  }
}

/** Return a fill with the pattern that the same source has in style.css. */
function pattern(id, colour) {
  const main = colour(`src-${styleOf(id)}`);
  const tile = document.createElement("canvas");
  const scale = Math.max(1, Math.round(devicePixelRatio));
  tile.width = tile.height = TILE * scale;
  const pen = tile.getContext("2d");
  pen.scale(scale, scale);
  pen.fillStyle = main;
  pen.strokeStyle = pen.fillStyle;
  if (id === "compute") {
    pen.fillStyle = colour("panel");
    pen.fillRect(0, 0, TILE, TILE);
    pen.strokeStyle = main;
  } else {
    pen.fillRect(0, 0, TILE, TILE);
    pen.strokeStyle = colour("panel");
  }
  pen.lineWidth = 1.2;
  pen.beginPath();
  if (id === "cpu" || id === "compute") diagonal(pen);
  if (id === "nvme") line(pen, 0, TILE / 2, TILE, TILE / 2);
  if (id === "s3") line(pen, TILE / 2, 0, TILE / 2, TILE);
  if (styleOf(id) === "other") line(pen, 0, TILE, TILE, 0);
  if (id === "peer") pen.arc(TILE / 2, TILE / 2, 1.2, 0, 7);
  pen.stroke();
  return pen.createPattern(tile, "repeat");
}

function diagonal(pen) {
  line(pen, -1, 1, 1, -1);
  line(pen, 0, TILE, TILE, 0);
  line(pen, TILE - 1, TILE + 1, TILE + 1, TILE - 1);
}

function line(pen, x1, y1, x2, y2) {
  pen.moveTo(x1, y1);
  pen.lineTo(x2, y2);
}
