// The texts of the page: numbers in words, the tooltip, the head of a panel.

const KEYS = "Scroll to zoom, drag to move, double-click to reset. "
  + "Keys: ← → + − 0, and Shift with an arrow to go from bar to bar.";

/** Returns the panel with its title and its numbers; `remark` is shown beside them. */
function describePanel({ panel, canvas }, remark) {
  const facts = panel.facts.map(({ name, value, note }) => make("div", {},
    make("dt", {}, name),
    make("dd", {}, make("span", { class: "value" }, value),
      make("span", { class: "note" }, note && ` (${note})`))));
  const { header, rows } = panel.table;
  const table = make("table", {},
    make("thead", {}, make("tr", {}, ...header.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, ...rows.map(
      ([rank, ...cells]) => make("tr", {}, make("th", { scope: "row" }, rank),
        ...cells.map((cell) => make("td", {}, cell))))));
  return make("section", { class: "panel", "aria-label": panel.title },
    make("div", { class: "head" },
      make("h2", {}, panel.title), make("dl", { class: "facts" }, ...facts),
      make("span", { class: "hint" }, remark)),
    canvas,
    make("details", {},
      make("summary", {}, "Time and memory by rank"), make("div", { class: "scroll" }, table)));
}

/** Returns the text of the tooltip for a bar, idle time or memory. */
function describe(hit, words) {
  const { lanes: { panel }, row } = hit;
  const time = (value) => inWords(value, panel.time_unit);
  const of = (n) => row.role === "sharding" ? words[row.lane.kinds[n]]
    : `${words[row.lane.kinds[n]]} of microbatch ${row.lane.microbatches[n]}`;
  const pairs = (found) => make("dl", {}, ...Object.entries(found).flatMap(
    ([name, value]) => [make("dt", {}, name), make("dd", {}, String(value))]));
  const name = (text, ...before) => make("div", { class: "name" }, ...before, text);
  if (row.role === "memory") {
    const cap = panel.caps.length === 0 ? {}
      : { "its cap": amountInWords(panel.caps[row.rank], panel.memory_unit) };
    const measured = hit.measured === undefined ? {} : {
      measured: amountInWords(hit.measured, panel.memory_unit),
      "measured peak": panel.measured_peaks[row.rank],
    };
    return [name(`rank ${row.rank} holds ${amountInWords(hit.held, panel.memory_unit)}`),
      pairs({ at: time(hit.time), "its peak": panel.peaks[row.rank], ...cap, ...measured })];
  }
  const { lane, timeline } = row;
  const when = { start: time(hit.start), end: time(hit.end), duration: time(hit.end - hit.start) };
  const note = row.role === "beneath" ? [make("p", {}, "simulated")] : [];
  if (hit.n === undefined) {
    const starting = lane.halves[hit.next] === "u" ? [hit.next, hit.next + 1] : [hit.next];
    const next = starting.filter((n) => n < lane.starts.length)
      .map((n) => `${of(n)}, stage ${lane.stages[n]}`).join(", with ");
    const then = next ? `Then it starts ${next}.` : "It has nothing more to do.";
    const waits = row.role === "sharding" ? "gathers and reduces nothing for" : "waits";
    return [name(`rank ${row.rank} ${waits} ${when.duration}`),
      pairs({ from: when.start, to: when.end }), make("p", {}, then), ...note];
  }
  const other = { w: [], u: [hit.n + 1], l: [hit.n - 1] }[hit.half]
    .map((n) => make("p", {}, `Overlaps with ${of(n)}, stage ${lane.stages[n]}.`));
  const colour = timeline.colours[lane.kinds[hit.n]][lane.stages[hit.n]];
  return [name(of(hit.n), coloured(colour)),
    pairs({ stage: lane.stages[hit.n], rank: row.rank, ...when }), ...other, ...note];
}

/** Formats a number with `digits` digits, like Python's format "g". */
function general(value, digits) {
  const [mantissa, exponent] = value.toExponential(digits - 1).split("e").map(Number);
  if (exponent >= -4 && exponent < digits) return String(Number(value.toPrecision(digits)));
  const size = String(Math.abs(exponent)).padStart(2, "0");
  return `${mantissa}e${exponent < 0 ? "-" : "+"}${size}`;
}

/** Formats a time like Panel.time. */
function inWords(value, unit) {
  if (unit === "") return general(value, 5);
  const [factor, name] = value >= 1 || value === 0 ? [1, "s"]
    : value >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  return `${general(value * factor, 4)} ${name}`;
}

/** Formats an amount of memory like Panel.memory. */
function amountInWords(value, unit) {
  if (unit === "") return general(value, 5);
  const power = [3, 2, 1, 0].find((each) => value >= 1024 ** each) ?? 0;
  return `${general(value / 1024 ** power, 4)} ${["B", "KiB", "MiB", "GiB"][power]}`;
}

function coloured(colour) {
  const made = make("i");
  made.style.background = colour;
  return made;
}

function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
