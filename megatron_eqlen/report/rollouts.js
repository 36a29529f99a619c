// Lists ROWS, made by step_page.py, by the filters of the form, and draws the rollout that is chosen: its tree to
// scale, and its text with a colour for each token.

const SVG = "http://www.w3.org/2000/svg", PROMPT = 4, ROW = 20, GAP = 8
const id = name => document.getElementById(name), filters = id("filters"), overlay = id("overlay")
let order = {key: "", down: true}, chosen = null, opened = null

function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties)
  made.append(...children)
  return made
}

// ---- the list

function passes(row) {
  const asked = name => filters.elements[name].value
  if (asked("verdict") && !row.verdicts.includes(asked("verdict"))) return false
  if (asked("source") && row.source !== asked("source")) return false
  for (const name of ["reward", "length", "gap"]) {
    const [low, high] = [asked(name + "-min"), asked(name + "-max")]
    if ((low || high) && row[name] === null) return false
    if (low && row[name] < +low || high && row[name] > +high) return false
  }
  return (row.prompt + " " + row.question).toLowerCase().includes(asked("words").toLowerCase())
}

function list() {
  const shown = ROWS.filter(passes)
  if (order.key) shown.sort((a, b) => ((a[order.key] ?? -Infinity) - (b[order.key] ?? -Infinity)) * (order.down ? -1 : 1))
  id("count").textContent = `${shown.length} of ${ROWS.length} rollouts`
  id("list").replaceChildren(...shown.map(row => {
    const about = `${row.title}${row.verdicts.length ? " · " + row.verdicts.join(", ") : ""}`
    const cells = ["reward", "length", "gap"].map(name => make("td", {textContent: row[name] ?? "–"}))
    const line = make("tr", {className: row === chosen ? "on" : "", onclick: () => choose(row, line)},
      make("td", {}, `step ${row.step} · ${row.prompt}`, make("small", {textContent: about})), ...cells)
    return line
  }))
}

// ---- the rollout

async function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed), c => c.charCodeAt(0))
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))
  return JSON.parse(await new Response(stream).text())
}

async function choose(row, line) {
  chosen = row
  for (const other of id("list").querySelectorAll(".on")) other.className = ""
  if (line) line.className = "on"
  opened = await unpack(row.packed)
  const names = new Set(opened.parts.flatMap(part => Object.keys(part.columns)))
  names.delete("given")
  const before = overlay.value
  overlay.replaceChildren(overlay.options[0], ...[...names].map(name => make("option", {textContent: name, value: name})))
  overlay.value = names.has(before) ? before : ""
  draw()
}

// Parts that continue each other share a row: the child that reaches furthest stays on its parent's.
function rows(parts) {
  const end = parts.map(part => part.start + part.tokens.length), reach = [...end], taken = [], row = []
  for (let i = parts.length - 1; i >= 0; i--)
    if (parts[i].parent >= 0) reach[parts[i].parent] = Math.max(reach[parts[i].parent], reach[i])
  const free = (n, i) => (taken[n] ?? []).every(([low, high]) => high <= parts[i].start || low >= end[i])
  const place = (parent, first) => {
    const children = parts.map((_, i) => i).filter(i => parts[i].parent === parent).sort((a, b) => reach[b] - reach[a] || b - a)
    for (const i of children) {
      for (row[i] = first; !free(row[i], i);) row[i]++
      ;(taken[row[i]] ??= []).push([parts[i].start, end[i]])
    }
    for (const i of children) place(i, row[i])
  }
  place(-1, 0)
  return row
}

function shape(tag, attributes) {
  const made = document.createElementNS(SVG, tag)
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value)
  return made
}

function tree(parts) {
  const row = rows(parts), scale = (100 - PROMPT) / Math.max(1, ...parts.map(part => part.start + part.tokens.length))
  const height = n => n * (ROW + GAP)
  const picture = shape("svg", {class: "stream", width: "100%", height: height(Math.max(0, ...row) + 1)})
  const box = (kind, left, top, width, label) => {
    const group = shape("g", {}), place = {x: left + "%", y: top, width: width + "%", height: ROW}
    const inner = shape("svg", place), text = shape("text", {x: 6, y: 14}), title = shape("title", {})
    text.textContent = title.textContent = label
    inner.append(text)
    group.append(title, shape("rect", {class: kind, ...place, rx: 3}), inner)
    picture.append(group)
    return group
  }
  box("prompt", 0, 0, PROMPT, "q")
  parts.forEach((part, i) => {
    const left = PROMPT + part.start * scale, top = height(row[i]), width = part.tokens.length * scale
    const above = part.parent < 0 ? 0 : row[part.parent]
    if (row[i] > above) picture.append(shape("line", {class: "fork", x1: left + "%", x2: left + "%", y1: height(above) + ROW, y2: top}))
    box(part.role, left, top, width, part.label).onclick = () => id(`part-${i}`).scrollIntoView({behavior: "smooth"})
    const right = left + width + "%"
    if (part.ended) picture.append(shape("line", {class: "end", x1: right, x2: right, y1: top, y2: top + ROW}))
  })
  return picture
}

const at = (column, i) => Array.isArray(column) ? column[i] : column

// Log-probs: the less likely, the stronger. Versions: the older, the stronger. Others: green above 0, red below.
function colour(name, value, low, high) {
  const [strength, hue] = name === "log-prob" ? [-value / 4, 28] : name === "version" ? [(high - value) / (high - low || 1), 265]
    : [Math.abs(value) / (Math.max(high, -low) || 1), value < 0 ? 10 : 145]
  return `hsl(${hue} 75% 50% / ${(0.65 * Math.min(strength, 1)).toFixed(2)})`
}

function text(part, ends) {
  const name = overlay.value, {given} = part.columns, plain = !name || part.columns[name] === undefined
  const block = make(plain ? "mark" : "span", {className: plain ? part.role : ""})
  part.tokens.forEach((token, i) => {
    const isGiven = given !== undefined && at(given, i)
    const opens = isGiven && (i === 0 || !at(given, i - 1)), closes = isGiven && (i + 1 === part.tokens.length || !at(given, i + 1))
    const span = make("span", {textContent: (opens ? "⟦" : "") + token + (closes ? "⟧" : ""), className: isGiven ? "given" : ""})
    if (!plain && !isGiven) span.style.background = colour(name, at(part.columns[name], i), ...ends)
    span.dataset.i = i
    block.append(span)
  })
  block.onmouseover = ({target: {dataset}}) => {
    if (dataset.i === undefined) return
    const numbers = Object.entries(part.columns).filter(([name]) => name !== "given").map(([name, column]) => `${name} ${at(column, dataset.i)}`)
    id("columns").textContent = [`${part.label}, token ${part.start + +dataset.i + 1}`, ...numbers].join(" · ")
  }
  return make("div", {className: "text"}, block)
}

function draw() {
  const {question, parts} = opened
  const values = parts.flatMap(part => part.columns[overlay.value] ?? [])
  const ends = [Math.min, Math.max].map(end => values.reduce((a, b) => end(a, b), values[0]))
  const shown = parts.map((part, i) => make("div", {className: "segment", id: `part-${i}`},
    make("div", {className: "soft"}, make("b", {textContent: part.label}), " · " + part.facts.join(" · ")), text(part, ends)))
  id("rollout").replaceChildren(make("h3", {textContent: `${chosen.prompt}, ${chosen.title}`}),
    make("p", {className: "text", textContent: question}), tree(parts), ...shown)
}

for (const [name, of] of [["verdict", row => row.verdicts], ["source", row => row.source]])
  for (const value of [...new Set(ROWS.flatMap(of))].sort()) filters.elements[name].append(make("option", {textContent: value, value}))
filters.oninput = list
filters.onsubmit = event => event.preventDefault()
overlay.onchange = () => opened && draw()
for (const head of document.querySelectorAll("[data-key]"))
  head.onclick = () => { order = {key: head.dataset.key, down: order.key !== head.dataset.key || !order.down}; list() }
list()
if (ROWS.length) choose(ROWS[0], id("list").firstChild)
