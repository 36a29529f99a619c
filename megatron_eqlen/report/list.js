// Lists ROWS by the filters of the form, and draws the rollout that is chosen.

const filters = id("filters")
let order = {key: "", down: true}, chosen = null, opened = null

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

async function choose(row, line) {
  chosen = row
  for (const other of id("list").querySelectorAll(".on")) other.className = ""
  if (line) line.className = "on"
  opened = await unpack(row.packed)
  offer([opened])
  drawRollout(id("rollout"), row, opened)
}

for (const [name, of] of [["verdict", row => row.verdicts], ["source", row => row.source]])
  for (const value of [...new Set(ROWS.flatMap(of))].sort()) filters.elements[name].append(make("option", {textContent: value, value}))
filters.oninput = list
filters.onsubmit = event => event.preventDefault()
overlay.onchange = () => opened && drawRollout(id("rollout"), chosen, opened)
for (const head of document.querySelectorAll("[data-key]"))
  head.onclick = () => { order = {key: head.dataset.key, down: order.key !== head.dataset.key || !order.down}; list() }
list()
if (ROWS.length) choose(ROWS[0], id("list").firstChild)
