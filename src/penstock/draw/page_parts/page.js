// Draws the result of page_data in penstock.draw.web_page. Text is inserted as text, never as HTML.
//
//   const timeline = new Timeline(element, data);
//   timeline.setData(other);    // draws something else in the same place
//   timeline.redraw();          // after the colours of the page have changed

/** Panels one below the other, with a legend, buttons and a tooltip. */
class Timeline {
  constructor(element, data) {
    Object.assign(this, { withMemory: true, hit: null, pointerTime: NaN, pointers: new Map() });
    this.legend = make("ul", { class: "legend", "aria-label": "Legend" });
    const tools = make("div", { class: "tools" }, this.legend,
      make("div", { class: "buttons" }, ...this.buildButtons()),
      make("span", { class: "hint" }, KEYS));
    this.body = make("div");
    this.tooltip = make("div", { class: "tooltip", role: "status" });
    element.replaceChildren(tools, this.body, this.tooltip);
    this.setData(data);
    // The height changes with the content; only a new width is a reason to draw again.
    new ResizeObserver(() => {
      if (this.body.clientWidth !== this.width) this.redraw();
    }).observe(this.body);
    const print = (isPrinting) => {
      this.isPrinting = isPrinting;
      this.redraw();
    };
    addEventListener("beforeprint", () => print(true));
    addEventListener("afterprint", () => print(false));
  }

  setData(data) {
    this.data = data;
    this.pointers.clear();
    this.words = Object.fromEntries(data.kinds.map((kind) => [kind.letter, kind.words]));
    const extents = new Map();
    for (const { time_unit: unit, timeline, beneath } of data.panels) {
      const ends = [timeline, ...beneath].map((each) => each.makespan);
      extents.set(unit, Math.max(extents.get(unit) ?? 0, ...ends));
    }
    // If the whole time is as long as before, the visible part stays.
    const before = this.axes;
    this.axes = new Map([...extents].map(([unit, extent]) => {
      const old = before?.get(unit);
      return [unit, old?.extent === extent ? old : new Axis(unit, extent || 1)];
    }));
    this.all = data.panels.map(
      (panel) => new Lanes(panel, this.axes.get(panel.time_unit), data.text_colour));
    const other = "in another unit, on its own axis";
    const remark = ({ axis }) => axis === this.all[0].axis ? "" : other;
    const open = [...this.body.querySelectorAll("details")].map((details) => details.open);
    const focused = [...this.body.querySelectorAll("canvas")].indexOf(document.activeElement);
    this.body.replaceChildren(...this.all.map((lanes) => describePanel(lanes, remark(lanes))));
    // Details that were open stay open.
    this.body.querySelectorAll("details").forEach((details, n) => { details.open = open[n]; });
    this.all.forEach((lanes) => this.listen(lanes));
    this.all[focused]?.canvas.focus({ preventScroll: true });
    this.fillLegend();
    this.memoryButton.hidden = !data.panels.some((panel) => panel.peak_memory > 0);
    this.point(null);
    this.redraw();
  }

  buildButtons() {
    const button = (text, label, act) => {
      const made = make("button", { type: "button", title: label, "aria-label": label }, text);
      made.addEventListener("click", () => act(made));
      return made;
    };
    const zoom = (factor) => {
      this.axes.forEach((axis) => axis.zoom(factor, (axis.start + axis.end) / 2));
      this.view();
    };
    const memory = button("memory", "Show the memory of each rank", () => {
      this.withMemory = !this.withMemory;
      memory.setAttribute("aria-pressed", this.withMemory);
      this.redraw();
    });
    memory.setAttribute("aria-pressed", this.withMemory);
    this.memoryButton = memory;
    return [
      button("+", "Zoom in", () => zoom(0.5)),
      button("−", "Zoom out", () => zoom(2)),
      button("reset", "Show the whole time", () => this.reset()),
      memory,
    ];
  }

  fillLegend() {
    const entry = (colours, words, extra = "") => make("li", {},
      make("span", { class: `swatch ${extra}` }, ...colours.map(coloured)), words);
    const shades = make("li", { class: "hint" }, "paler: later stages of a rank");
    const hasShades = this.data.kinds[0].colours.length > 1;
    const dashes = make("li", { class: "hint" }, "dashed: what a rank may hold");
    const hasCaps = this.data.panels.some(
      ({ caps, memory_scale: scale }) => caps.some((cap) => cap <= scale));
    const line = make("li", { class: "hint" }, "line: measured memory");
    const hasMeasured = this.data.panels.some(({ measured }) => measured.length > 0);
    this.legend.replaceChildren(
      ...this.data.kinds.map((kind) => entry(kind.colours, kind.words)),
      entry([], "idle", "idle"), ...(hasShades ? [shades] : []), ...(hasCaps ? [dashes] : []),
      ...(hasMeasured ? [line] : []));
  }

  /** Lays everything out again, at the resolution of the screen or the printer. */
  redraw() {
    const scale = this.isPrinting ? 3 : devicePixelRatio;
    const width = this.width = this.body.clientWidth;
    if (width === 0) return;
    // The page's colours in the current theme.
    const style = (name) => {
      this.body.style.color = `var(--${name})`;
      return getComputedStyle(this.body).color;
    };
    const names = ["ink", "muted", "track", "line", "memory", "over"];
    this.colours = Object.fromEntries(names.map((name) => [name, style(name)]));
    this.body.style.color = "";
    for (const lanes of this.all) {
      lanes.layOut(width, this.withMemory && lanes.panel.peak_memory > 0, scale);
    }
    this.paint();
  }

  paint() {
    for (const lanes of this.all) {
      const time = lanes.axis === this.pointerAxis ? this.pointerTime : NaN;
      lanes.draw(this.colours, this.hit, time);
    }
  }

  /** Paints once for all changes until the browser shows the next frame. */
  view() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.paint();
    });
  }

  reset() {
    this.axes.forEach((axis) => axis.reset());
    this.view();
  }

  /** Marks what is at the pointer, and describes it in the tooltip. */
  point(hit, x = 0, y = 0) {
    this.hit = hit;
    this.tooltip.replaceChildren(...(hit ? describe(hit, this.words) : []));
    const { offsetWidth: width, offsetHeight: height } = this.tooltip;
    const left = x + 16 + width > innerWidth ? x - 16 - width : x + 16;
    const top = y + 18 + height > innerHeight ? y - 12 - height : y + 18;
    this.tooltip.style.transform = `translate(${Math.max(left, 4)}px, ${Math.max(top, 4)}px)`;
  }

  listen(lanes) {
    const { canvas, axis } = lanes;
    const on = (name, act) => canvas.addEventListener(name, act, { passive: false });
    on("wheel", (event) => this.roll(lanes, event));
    on("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.pointers.set(event.pointerId, { x: event.offsetX, time: lanes.time(event.offsetX) });
      canvas.classList.add("dragged");
    });
    for (const name of ["pointerup", "pointercancel"]) {
      on(name, (event) => {
        this.pointers.delete(event.pointerId);
        for (const pointer of this.pointers.values()) pointer.time = lanes.time(pointer.x);
        canvas.classList.remove("dragged");
        this.point(lanes.find(event.offsetX, event.offsetY), event.clientX, event.clientY);
        this.view();
      });
    }
    on("pointermove", (event) => {
      const pointer = this.pointers.get(event.pointerId);
      if (pointer) {
        pointer.x = event.offsetX;
        this.drag(lanes);
      }
      this.pointerTime = lanes.isInside(event.offsetX) ? lanes.time(event.offsetX) : NaN;
      this.pointerAxis = axis;
      const hit = this.pointers.size ? null : lanes.find(event.offsetX, event.offsetY);
      this.point(hit, event.clientX, event.clientY);
      this.view();
    });
    for (const name of ["pointerleave", "blur"]) {
      on(name, (event) => {
        if (event.pointerType === "touch") return; // Fires when a finger is lifted.
        this.pointerTime = NaN;
        this.point(null);
        this.view();
      });
    }
    on("dblclick", () => this.reset());
    on("keydown", (event) => this.press(lanes, event));
  }

  /** Zooms about the pointer by the wheel; sideways or with Shift, moves. */
  roll(lanes, event) {
    const { axis } = lanes;
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    // Lines are longer than pixels, and two fingers on a touchpad (ctrl) make small steps.
    const unit = (event.deltaMode === 1 ? 16 : 1) * (event.ctrlKey ? 5 : 1);
    const by = (sideways ? event.deltaX || event.deltaY : event.deltaY) * unit;
    // Over the names, and when everything is visible, the wheel scrolls the page.
    const changed = lanes.isInside(event.offsetX) && (sideways
      ? axis.move(by / lanes.plotWidth * axis.length)
      : axis.zoom(Math.exp(by * 0.002), lanes.time(event.offsetX)));
    if (changed) event.preventDefault();
    this.view();
  }

  /** Keeps the time under each pointer: one pointer moves the axis, two also stretch it. */
  drag({ axis, left, plotWidth }) {
    const [one, two] = [...this.pointers.values()];
    const stretched = two ? (two.time - one.time) / (two.x - one.x) * plotWidth : axis.length;
    const isSane = stretched > 0 && stretched < Infinity;
    const length = axis.clampLength(isSane ? stretched : axis.length);
    axis.show(one.time - (one.x - left) / plotWidth * length, length);
  }

  press(lanes, event) {
    const { axis } = lanes;
    const middle = (axis.start + axis.end) / 2;
    const acts = {
      "+": () => axis.zoom(0.5, middle),
      "=": () => axis.zoom(0.5, middle),
      "-": () => axis.zoom(2, middle),
      "0": () => this.reset(),
      ArrowLeft: () => axis.move(-axis.length / 8),
      ArrowRight: () => axis.move(axis.length / 8),
      Escape: () => this.point(null),
    };
    const isStep = event.shiftKey && event.key.startsWith("Arrow");
    const act = isStep ? () => this.step(lanes, event.key) : acts[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
    this.view();
  }

  /** Goes from bar to bar: left and right along a lane, up and down to another lane. */
  step(lanes, key) {
    const rows = lanes.rows.filter((row) => row.role !== "memory");
    let row = rows[0], n = 0;
    if (this.hit?.lanes === lanes && this.hit.n !== undefined) {
      const { start, end } = this.hit;
      const along = { ArrowLeft: -1, ArrowRight: 1 }[key] ?? 0;
      const across = { ArrowUp: -1, ArrowDown: 1 }[key] ?? 0;
      row = rows[clamp(rows.indexOf(this.hit.row) + across, 0, rows.length - 1)];
      n = across ? countUpTo(row.lane.starts, (start + end) / 2) - 1 : this.hit.n + along;
    }
    const hit = lanes.bar(row, clamp(n, 0, row.lane.starts.length - 1));
    const isSeen = hit.start >= lanes.axis.start && hit.end <= lanes.axis.end;
    if (!isSeen) lanes.axis.move(hit.start - (lanes.axis.start + lanes.axis.end) / 2);
    const box = lanes.canvas.getBoundingClientRect();
    this.point(hit, box.left + lanes.x(hit.start), box.top + row.y + row.height - 12);
  }
}

/** Lets a button switch between light and dark; `#dark` or `#light` in the address does too. */
function connectTheme(button, changed) {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const current = () => root.dataset.theme ?? (system.matches ? "dark" : "light");
  const set = (theme) => {
    if (theme) root.dataset.theme = theme;
    else delete root.dataset.theme;
    const other = current() === "dark" ? "light" : "dark";
    button.textContent = other;
    button.title = `Show in ${other} colours`;
    button.setAttribute("aria-label", `Show in ${other} colours`);
    changed();
  };
  let chosen = ["#dark", "#light"].includes(location.hash) ? location.hash.slice(1) : undefined;
  set(chosen);
  button.hidden = false;
  button.addEventListener("click", () => set(chosen = current() === "dark" ? "light" : "dark"));
  system.addEventListener("change", () => set(chosen));
  addEventListener("beforeprint", () => set("light"));
  addEventListener("afterprint", () => set(chosen));
}
