// Draws the charts of the page with uPlot.
"use strict";
(() => {
const at = id => document.getElementById(id);
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const DASHES = [[], [8, 5], [2, 4], [10, 4, 2, 4]];  // lines that coincide show each other through the gaps

// ---- numbers ---------------------------------------------------------------------------------------------

function short(value) {
  if (value == null || !isFinite(value)) return "–";
  const size = Math.abs(value);
  for (const [scale, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (size >= 10 * scale || (scale > 1e3 && size >= scale)) return +(value / scale).toPrecision(3) + unit;
  return size > 0 && size < 1e-3 ? value.toExponential(1) : String(+value.toPrecision(3));
}

// Exponential moving average, corrected for its start.
function smoothed(values, weight) {
  let sum = 0, norm = 0;
  return values.map(value => {
    if (value == null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

// ---- charts ----------------------------------------------------------------------------------------------

const hidden = new Map(), zoomed = new Map();  // by title: a section's update keeps both
const asked = {
  get smoothing() { return +(at("smoothing")?.value ?? 0); },
  get log() { return at("log")?.checked ?? false; },
  get clock() { return at("clock")?.checked ?? false; },
};

// [places, name of the axis]
function places(chart) {
  if (!asked.clock || !chart.seconds) return [chart.x, chart.xName];
  const longest = Math.max(...chart.seconds);
  const [unit, name] = longest < 300 ? [1, "seconds"] : longest < 18000 ? [60, "minutes"] : [3600, "hours"];
  return [chart.seconds.map(value => value / unit), `${name} since the start`];
}

function lines(chart, shown, log) {
  const known = values => log ? values.map(value => value > 0 ? value : null) : values;
  const data = [], series = [], bands = [];
  const add = (values, options) => { data.push(known(values)); series.push({spanGaps: true, ...options}); };
  shown.forEach((one, n) => {
    if (!one) return;
    const stroke = () => colour(`--c${(one.colour ?? n) % 10}`), faint = () => stroke() + "38";
    if (one.low) {
      add(one.high, {stroke: faint, width: 1, points: {show: false}});
      add(one.low, {stroke: faint, width: 1, points: {show: false}});
      bands.push({series: [series.length - 1, series.length], fill: faint});
    }
    if (asked.smoothing) add(one.y, {stroke: faint, width: 1, points: {show: false}});
    const values = asked.smoothing ? smoothed(one.y, asked.smoothing) : one.y;
    add(values, {stroke, width: n % 4 || shown.length === 1 ? 2 : 3.4, dash: DASHES[n % 4], legendOf: n});
  });
  return {data, series, bands};
}

// Bars of the sums, the highest first: each later one covers what is below it.
function stack(chart, shown) {
  const sums = chart.x.map(() => 0), data = [], series = [];
  shown.forEach((one, n) => {
    if (!one) return;
    one.y.forEach((value, i) => { sums[i] += value ?? 0; });
    data.unshift([...sums]);
    const stroke = () => colour(`--c${(one.colour ?? n) % 10}`);
    series.unshift({stroke, fill: stroke, width: 0, paths: uPlot.paths.bars({size: [0.84, 60]}), points: {show: false}, legendOf: n});
  });
  return {data, series, bands: []};
}

function draw(figure) {
  const chart = JSON.parse(figure.dataset.chart), box = figure.querySelector(".plot");
  const keys = [...figure.querySelectorAll(".legend button")];
  const off = hidden.get(chart.title) ?? new Set();
  keys.forEach((key, n) => key.setAttribute("aria-pressed", !off.has(n)));
  figure.plot?.destroy();
  figure.plot = null;
  if (!box.clientWidth) return;  // not shown: the observer draws it when it is
  const [xs, xName] = places(chart), shown = chart.series.map((one, n) => off.has(n) ? null : one);
  const log = asked.log && !chart.stacked && shown.some(one => one?.y.some(value => value > 0));
  const {data, series, bands} = chart.stacked ? stack(chart, shown) : lines(chart, shown, log);
  const axis = {
    stroke: () => colour("--soft"), font: "11px system-ui, sans-serif", labelFont: "11px system-ui, sans-serif",
    grid: {stroke: () => colour("--line"), width: 1}, ticks: {show: false},
  };
  const whole = xName === "step";
  const range = (plot, low, high) => low === high ? [low - (whole ? 1 : low / 10 || 1), high + (whole ? 1 : high / 10 || 1)] : [low, high];
  const bar = xs.length > 1 ? (xs.at(-1) - xs[0]) / (xs.length - 1) / 2 : 0.5;
  const options = {
    width: box.clientWidth, height: box.clientHeight, legend: {show: false}, bands,
    padding: [8, 8, 0, 0],
    cursor: {sync: {key: xName, scales: ["x", null]}, y: false, drag: {x: true, y: false}},
    scales: {
      x: {time: false, range: chart.stacked ? (plot, low, high) => [low - bar, high + bar] : range},
      y: {distr: log ? 3 : 1, ...(chart.stacked && {range: (plot, low, high) => [0, high]})},
    },
    axes: [
      {...axis, label: xName, labelSize: 16, labelGap: 0, size: 24, ...(whole && {incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5]}),
       values: (plot, ticks) => ticks.map(short)},
      {...axis, size: 46, values: (plot, ticks) => ticks.map(tick => tick == null ? "" : short(tick))},
    ],
    series: [{}, ...series],
    hooks: {
      setCursor: [plot => keys.forEach((key, n) => {
        const value = plot.cursor.idx == null ? null : chart.series[n].y[plot.cursor.idx];
        key.lastElementChild.textContent = value == null ? key.dataset.last : short(value);
      })],
      setSelect: [plot => { if (plot.select.width) zoomed.set(chart.title + xName, [plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")]); }],
    },
  };
  figure.plot = new uPlot(options, [xs, ...data], box);
  const zoom = zoomed.get(chart.title + xName);
  if (zoom) figure.plot.setScale("x", {min: zoom[0], max: zoom[1]});
  figure.plot.over.addEventListener("dblclick", () => zoomed.delete(chart.title + xName));
}

const observer = new ResizeObserver(entries => {
  for (const {target} of entries) {
    const figure = target.parentElement;
    if (!figure.plot || figure.plot.width !== target.clientWidth) draw(figure);
  }
});

function start(box) {
  for (const figure of box.querySelectorAll(".chart")) {
    const {title} = JSON.parse(figure.dataset.chart);
    figure.querySelectorAll(".legend button").forEach((key, n) => {
      key.dataset.last = key.lastElementChild.textContent;
      key.addEventListener("click", () => {
        const off = hidden.get(title) ?? new Set();
        if (!off.delete(n)) off.add(n);
        hidden.set(title, off);
        draw(figure);
      });
    });
    observer.observe(figure.querySelector(".plot"));
  }
}

const drawAll = () => document.querySelectorAll(".chart").forEach(draw);
for (const id of ["smoothing", "log", "clock"]) at(id)?.addEventListener("input", drawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
start(document);
})();
