// Draws rollouts of ROWS, made by recorded.py: each one's tree to scale, and its text with a colour for each token.

const SVG = "http://www.w3.org/2000/svg", PROMPT = 4, ROW = 20, GAP = 8, CONTEXT = 24
const id = name => document.getElementById(name), overlay = id("overlay")

function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties)
  made.append(...children)
  return made
}

async function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed), c => c.charCodeAt(0))
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))
  return JSON.parse(await new Response(stream).text())
}

// Offer the columns of these rollouts as colours.
function offer(details) {
  const names = new Set(details.flatMap(detail => detail.parts).flatMap(part => Object.keys(part.columns))), before = overlay.value
  names.delete("given")
  overlay.replaceChildren(overlay.options[0], ...[...names].map(name => make("option", {textContent: name, value: name})))
  overlay.value = names.has(before) ? before : ""
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

function tree(parts, show) {
  const row = rows(parts), scale = (100 - PROMPT) / Math.max(1, ...parts.map(part => part.start + part.tokens.length))
  const height = n => n * (ROW + GAP)
  const picture = shape("svg", {class: "stream", width: "100%", height: height(Math.max(0, ...row) + 1)})
  const box = (kind, left, top, width, label, about) => {
    const group = shape("g", {}), place = {x: left + "%", y: top, width: width + "%", height: ROW}
    const inner = shape("svg", place), text = shape("text", {x: 6, y: 14}), title = shape("title", {})
    text.textContent = label
    title.textContent = about
    inner.append(text)
    group.append(title, shape("rect", {class: kind, ...place, rx: 3}), inner)
    picture.append(group)
    return group
  }
  box("prompt", 0, 0, PROMPT, "q", "the prompt")
  parts.forEach((part, i) => {
    const left = PROMPT + part.start * scale, top = height(row[i]), width = part.tokens.length * scale
    const above = part.parent < 0 ? 0 : row[part.parent]
    if (row[i] > above) picture.append(shape("line", {class: "fork", x1: left + "%", x2: left + "%", y1: height(above) + ROW, y2: top}))
    box(part.role, left, top, width, part.label, [part.label, ...part.facts].join(" · ")).onclick = () => show(i)
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

// The end of what a part inherits, whose tokens are not trained again.
function inherited(parts, i) {
  let text = []
  for (let at = parts[i].parent; at >= 0 && text.length < CONTEXT; at = parts[at].parent) text = [...parts[at].tokens, ...text]
  return text.length ? "…" + text.slice(-CONTEXT).join("") : ""
}

function text(parts, i, ends) {
  const part = parts[i]
  const name = overlay.value, {given} = part.columns, plain = !name || part.columns[name] === undefined
  const block = make(plain ? "mark" : "span", {className: plain ? part.role : ""})
  part.tokens.forEach((token, n) => {
    const isGiven = given !== undefined && at(given, n)
    const opens = isGiven && (n === 0 || !at(given, n - 1)), closes = isGiven && (n + 1 === part.tokens.length || !at(given, n + 1))
    const span = make("span", {textContent: (opens ? "⟦" : "") + token + (closes ? "⟧" : ""), className: isGiven ? "given" : ""})
    if (!plain && !isGiven) span.style.background = colour(name, at(part.columns[name], n), ...ends)
    span.dataset.n = n
    block.append(span)
  })
  block.onmouseover = ({target: {dataset}}) => {
    if (dataset.n === undefined) return
    const numbers = Object.entries(part.columns).filter(([name]) => name !== "given").map(([name, column]) => `${name} ${at(column, dataset.n)}`)
    id("columns").textContent = [`${part.label}, token ${part.start + +dataset.n + 1}`, ...numbers].join(" · ")
  }
  return make("div", {className: "text"}, make("span", {className: "before", textContent: inherited(parts, i)}), block)
}

// Draw a rollout into `place`; with `folded` its text is made when somebody opens it.
function drawRollout(place, row, {question, parts}, folded = null) {
  const values = parts.flatMap(part => part.columns[overlay.value] ?? [])
  const ends = [Math.min, Math.max].map(end => values.reduce((a, b) => end(a, b), values[0]))
  const shown = make("div", {className: "sides"}), texts = make("details", {open: folded === false}, make("summary", {textContent: "Text"}))
  const fill = () => shown.childElementCount || shown.append(...parts.map((part, i) => make("div", {className: "segment"},
    make("div", {className: "soft"}, make("b", {textContent: part.label}), " · " + part.facts.join(" · ")), text(parts, i, ends))))
  const show = i => { texts.open = true; fill(); shown.children[i].scrollIntoView({behavior: "smooth", block: "nearest"}) }
  texts.append(shown)
  texts.ontoggle = fill
  if (!folded) fill()
  place.replaceChildren(make("div", {}, make("b", {textContent: row.prompt}), " ", make("span", {className: "soft", textContent: row.title})),
    ...(question ? [make("p", {className: "text", textContent: question})] : []), tree(parts, show), folded === null ? shown : texts)
}

// The run's page has a place for each rollout, the first of each step open.
async function drawAll(places) {
  const details = await Promise.all(ROWS.map(row => unpack(row.packed)))
  const all = () => places.forEach((place, i) => {
    const before = place.querySelector("details"), folded = before ? !before.open : i > 0 && ROWS[i - 1].step === ROWS[i].step
    drawRollout(place, ROWS[i], details[i], folded)
  })
  offer(details)
  overlay.onchange = all
  all()
}
