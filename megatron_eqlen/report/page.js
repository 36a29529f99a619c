// Draws CHARTS, made by charts.py, with BokehJS: hover shows values, dragging zooms. Text and grid take their
// colours from the page's style sheet (--bk-...), so that they follow the browser's light or dark scheme.

// Lines that coincide show each other through the gaps.
const DASHES = [[], [8, 5], [2, 4], [10, 4, 2, 4]]

const NUMBERS = `
for (const [scale, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
  if (Math.abs(tick) >= (scale > 1e3 ? 1 : 10) * scale) return +(tick / scale).toPrecision(4) + unit
return Math.abs(tick) < 1e-3 && tick ? tick.toExponential(1) : String(+tick.toPrecision(4))
`

function frame(chart) {
  const plot = Bokeh.Plotting.figure({
    height: 200, sizing_mode: "stretch_width", toolbar_inner: true, output_backend: "canvas",
    tools: [new Bokeh.BoxZoomTool({dimensions: "width", visible: false}), new Bokeh.ResetTool()],
    background_fill_alpha: 0, border_fill_alpha: 0, outline_line_color: null, x_axis_label: "step",
  })
  plot.toolbar.autohide = true
  plot.toolbar.logo = null
  for (const axis of [...plot.xaxes, ...plot.yaxes]) {
    axis.axis_line_color = axis.major_tick_line_color = axis.minor_tick_line_color = null
    axis.formatter = new Bokeh.CustomJSTickFormatter({code: NUMBERS})
  }
  plot.yaxis.ticker = new Bokeh.BasicTicker({desired_num_ticks: 5})
  plot.xaxis.ticker = new Bokeh.BasicTicker({desired_num_ticks: 5, mantissas: [1, 2, 5], min_interval: 1})
  return plot
}

// The points that a series has: its line spans gaps.
function known(x, series) {
  const columns = {x, ...series.columns}
  const there = x.map((_, i) => i).filter(i => series.columns.y[i] !== null)
  return Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, there.map(i => values[i])]))
}

// Return what hover looks for: an invisible line with a point at each x.
function lines(plot, chart, source) {
  chart.series.forEach((series, n) => {
    const columns = known(chart.x, series), data = new Bokeh.ColumnDataSource({data: columns})
    const style = {color: series.colour, line_dash: DASHES[n % 4], line_width: n || chart.series.length == 1 ? 2 : 3}
    const column = name => ({field: name})
    if (columns.low) plot.varea(column("x"), column("low"), column("high"), {source: data, color: series.colour, alpha: 0.22})
    if (columns.smooth) plot.line(column("x"), column("y"), {source: data, color: series.colour, alpha: 0.3})
    plot.line(column("x"), column(columns.smooth ? "smooth" : "y"), {source: data, ...style})
    if (columns.x.length < 10) plot.scatter(column("x"), column("y"), {source: data, size: 5, color: series.colour})
  })
  return plot.line({field: "x"}, {field: "hover"}, {source, alpha: 0})
}

// Draw bars on top of each other. Return what hover looks for.
function bars(plot, chart, source) {
  const x = chart.x, width = 0.84 * (x[x.length - 1] - x[0]) / Math.max(x.length - 1, 1) || 0.84
  plot.y_range = new Bokeh.DataRange1d({start: 0})
  let bottom = x.map(() => 0)
  const drawn = chart.series.map((series, n) => {
    const top = bottom.map((low, i) => low + series.columns.y[i])
    Object.assign(source.data, {[`bottom${n}`]: bottom, [`top${n}`]: top})
    bottom = top
    const ends = {bottom: {field: `bottom${n}`}, top: {field: `top${n}`}}
    return plot.vbar({x: {field: "x"}, width, ...ends, color: series.colour, source})
  })
  return drawn[0]
}

// Draw bars from chart.starts to chart.x, with the intervals of their heights. Return what hover looks for.
function parts(plot, chart, source) {
  const [{columns, colour}] = chart.series
  Object.assign(source.data, {...columns, left: chart.starts, middle: chart.x.map((x, i) => (x + chart.starts[i]) / 2)})
  plot.xaxis.axis_label = "tokens of a response, %"
  const column = name => ({field: name})
  plot.segment({x0: column("middle"), x1: column("middle"), y0: column("low"), y1: column("high"), color: colour, line_width: 2, source})
  return plot.quad({left: column("left"), right: column("x"), bottom: 0, top: column("y"), color: colour, alpha: 0.5, source})
}

CHARTS.forEach((chart, number) => {
  const plot = frame(chart)
  const values = chart.series.map((series, n) => [`y${n}`, series.columns.y.map(y => y ?? NaN)])
  const source = new Bokeh.ColumnDataSource({
    data: {x: chart.x, hover: chart.hover, ...(chart.clock.length && {clock: chart.clock}), ...Object.fromEntries(values)},
  })
  const looked = chart.starts.length ? parts(plot, chart, source) : chart.stacked ? bars(plot, chart, source) : lines(plot, chart, source)
  const where = chart.starts.length ? "@left to @x% of a response" : "step @x{0.[00]}" + (chart.clock.length ? ", @clock after the start" : "")
  plot.add_tools(new Bokeh.HoverTool({
    tooltips: [["", where], ...chart.series.map((series, n) => [series.name, `@y${n}{%.5g}`])],
    formatters: Object.fromEntries(chart.series.map((_, n) => [`@y${n}`, "printf"])),
    mode: "vline", renderers: [looked], point_policy: "follow_mouse", attachment: "horizontal", visible: false,
  }))
  Bokeh.Plotting.show(plot, `#chart-${number}`)
})
