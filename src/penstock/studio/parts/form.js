// The fields: their labels, their sliders and their problems.
"use strict";

/** `slider` is [least, most, step]; a field may hold more than its slider shows. `range`, of a
 * field without one, is [least, step]: how the arrow keys change it. */
const GROUPS = [
  ["Shape", "", [
    { name: "ranks", label: "Ranks", hint: "p", slider: [1, 32, 1] },
    { name: "microbatches", label: "Microbatches", hint: "m",
      slider: [1, 128, 1] },
    { name: "stages_per_rank", label: "Stages per rank", hint: "if free",
      empty: "its own", range: [1, 1] },
    { name: "lengths", label: "Lengths", hint: "512,2048,… tokens", empty: "all alike" },
    { name: "work", label: "Work", hint: "per token, squared" },
  ]],
  ["Costs", "of a rank, or 1,1,1,2 along the model", [
    { name: "forward", label: "Forward", hint: "time of F", slider: [0, 4, 0.1] },
    { name: "backward_input", label: "Input backward", hint: "time of I", slider: [0, 4, 0.1] },
    { name: "backward_weight", label: "Weight backward", hint: "time of W", slider: [0, 4, 0.1] },
    { name: "backward", label: "Full backward", hint: "time of B", empty: "I + W",
      range: [0, 0.1] },
    { name: "recompute_time", label: "Recomputation", hint: "time of R", empty: "as F",
      range: [0, 0.1] },
    { name: "delay", label: "Message delay", hint: "between ranks", slider: [0, 2, 0.05] },
    { name: "overlap_saving", label: "Overlap saving", hint: "of a pair, 0 to 1", range: [0, 0.1] },
  ]],
  ["Memory", "of a microbatch", [
    { name: "activation", label: "Activation", hint: "held from F to I", range: [0, 0.1] },
    { name: "after_input", label: "After input", hint: "held from I to W", range: [0, 0.1] },
    { name: "after_dropping", label: "Dropped", hint: "held from F to R", range: [0, 0.1] },
    { name: "memory", label: "Cap", hint: "or 4,4,3,3 by rank", empty: "none", range: [1, 1] },
  ]],
  ["Schedule", "", [
    { name: "schedule", label: "Schedule", hint: "what is drawn", options: "schedules" },
    { name: "beside", label: "Beside", hint: "drawn under it", options: "schedules or none" },
    { name: "clock", label: "Clock", hint: "what is compared", options: "clock" },
    { name: "search", label: "Search", hint: "for a better one", options: "search" },
    { name: "recompute", label: "Recompute", hint: "in searches", options: "recompute" },
    { name: "units", label: "Units", hint: "if they are known", options: "units" },
  ]],
];

/** All fields. Each change by the user calls `changed` with typed, chosen or dragged. */
class Form {
  constructor(element, start, changed) {
    this.defaults = start.fields;
    this.changed = changed;
    this.inputs = {};
    this.sliders = {};
    const names = [...start.schedules.map(({ name }) => name), "searched"];
    this.lists = { schedules: names, "schedules or none": ["", ...names], ...start.choices };
    this.largest = start.largest;
    element.replaceChildren(...GROUPS.map(([title, hint, fields]) => make("fieldset", {},
      make("legend", {}, title, make("span", { class: "hint" }, hint)),
      ...fields.map((field) => this.buildField(field)))));
    element.addEventListener("submit", (event) => event.preventDefault());
  }

  buildField({ name, label, hint, slider, range, options, empty = "" }) {
    const described = { "aria-describedby": `${name}-hint ${name}-problem` };
    const input = this.inputs[name] = options
      ? make("select", { id: name, name, ...described }, ...this.buildOptions(options))
      : make("input", { id: name, name, ...described, type: "text", spellcheck: "false",
        inputmode: "text", placeholder: empty });
    input.addEventListener(options ? "change" : "input", () => {
      this.follow(name);
      this.changed(options ? "chosen" : "typed");
    });
    const [least, step] = range ?? (slider ? [slider[0], slider[2]] : []);
    if (step) input.addEventListener("keydown", (event) => this.stepBy(event, name, least, step));
    const track = slider ? [this.buildSlider(name, label, slider)] : [];
    return make("div", { class: "field" },
      make("label", { for: name }, label,
        make("span", { class: "hint", id: `${name}-hint` },
          name in this.largest ? `${hint}, up to ${this.largest[name]}` : hint)),
      make("div", { class: "entry" }, input, ...track),
      make("p", { class: "problem", id: `${name}-problem` }));
  }

  buildOptions(options) {
    return this.lists[options].map((value) => make("option", { value }, value || "nothing"));
  }

  buildSlider(name, label, [min, max, step]) {
    const slider = this.sliders[name] = make("input", {
      type: "range", min, max, step, "aria-label": `${label}, slider` });
    slider.addEventListener("input", () => {
      this.inputs[name].value = slider.value;
      this.changed("dragged");
    });
    return slider;
  }

  /** Moves the slider to the value of the field; a list disables it. There are as many
   * microbatches as lengths. */
  follow(name) {
    if (name === "lengths" && this.get(name).trim()) {
      this.set("microbatches", String(this.get(name).split(",").length));
    }
    const slider = this.sliders[name];
    if (!slider) return;
    const number = asNumber(this.inputs[name].value);
    slider.disabled = Number.isNaN(number);
    if (!slider.disabled) slider.value = number;
  }

  /** Changes a number by the arrow keys up and down, ten times as much with Shift. */
  stepBy(event, name, least, step) {
    const by = { ArrowUp: step, ArrowDown: -step }[event.key];
    const input = this.inputs[name];
    const number = input.value.trim() === "" ? 0 : asNumber(input.value);
    if (!by || Number.isNaN(number) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    const next = Math.max(number + by * (event.shiftKey ? 10 : 1), least);
    input.value = String(Number(next.toFixed(6)));
    this.follow(name);
    this.changed("typed");
  }

  /** Sets the given fields, and the others to their defaults; returns what is unknown. */
  fill(values) {
    const unknown = Object.keys(values).filter((name) => !(name in this.inputs));
    for (const [name, input] of Object.entries(this.inputs)) {
      input.value = values[name] ?? this.defaults[name];
      if (input.selectedIndex === -1) { // No such choice.
        input.value = this.defaults[name];
        unknown.push(name);
      }
      if (name !== "lengths" || !("microbatches" in values)) this.follow(name);
    }
    return unknown.map((name) => `${name}=${values[name]}`);
  }

  get(name) { return this.inputs[name].value; }

  set(name, value) {
    this.inputs[name].value = value;
    this.follow(name);
  }

  get query() { return new URLSearchParams(this.entries()).toString(); }

  /** Only the fields that differ from their defaults, to keep the address short. */
  get address() {
    const other = this.entries().filter(([name, value]) => value !== this.defaults[name]);
    return new URLSearchParams(other).toString();
  }

  entries() { return Object.entries(this.inputs).map(([name, input]) => [name, input.value]); }

  /** Shows the problem of each field beside it; returns problems that belong to no field. */
  complain(problems) {
    for (const [name, input] of Object.entries(this.inputs)) {
      const text = problems[name] ?? "";
      document.getElementById(`${name}-problem`).textContent = text;
      if (text) input.setAttribute("aria-invalid", "true");
      else input.removeAttribute("aria-invalid");
    }
    return Object.entries(problems).filter(([name]) => !(name in this.inputs))
      .map(([, text]) => text).join(" ");
  }
}

/** Returns one finite number, or NaN. */
function asNumber(text) {
  const number = text.trim() === "" ? NaN : Number(text);
  return Number.isFinite(number) ? number : NaN;
}
