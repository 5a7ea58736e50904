// All schedules side by side, as they become known.
"use strict";

/** `chosen(name)` is called when a row is clicked; `sources` has the source of each schedule. */
class Table {
  constructor(element, sources, chosen) {
    this.sources = sources;
    this.rows = new Map();
    this.places = {};
    this.clock = make("th", { scope: "col" });
    const names = ["bubble", "peak memory", "gap", "placement", "why not"];
    this.body = make("tbody");
    element.replaceChildren(
      make("thead", {}, make("tr", {},
        make("th", { scope: "col" }, "schedule"), this.clock,
        ...names.map((name) => make("th", { scope: "col" }, name)))),
      this.body);
    this.body.addEventListener("click", ({ target }) => {
      const row = target.closest("tr");
      const { isCollapsed, anchorNode } = getSelection();
      const isMarked = !isCollapsed && this.body.contains(anchorNode); // To copy numbers.
      if (row && !row.classList.contains("none") && !isMarked) chosen(row.dataset.name);
    });
  }

  /** Marks all rows as old; they stay until they are replaced, so that nothing jumps. */
  begin(clock) {
    this.clock.textContent = clock;
    for (const row of this.rows.values()) row.isOld = true;
    this.show();
  }

  add(data) {
    this.set(data, false);
    return this.show();
  }

  /** Removes the rows that were not replaced, except one that will come later. */
  end(exception) {
    for (const [name, { isOld }] of this.rows) {
      if (isOld && name !== exception) this.rows.delete(name);
    }
    this.show();
  }

  remove(name) {
    this.rows.delete(name);
    return this.show();
  }

  /** Shows in a row that a search is running; the previous result stays in it. */
  wait(name) {
    const before = this.rows.get(name)?.data ?? { fits: true, time: null, peak: null, cells: [] };
    this.set({ ...before, name, why: "searching …" }, true);
    this.show();
  }

  set(data, isOld) {
    const before = this.rows.get(data.name);
    const isSame = before && JSON.stringify(before.data) === JSON.stringify(data);
    const element = isSame ? before.element : buildRow(data, this.sources[data.name]);
    this.rows.set(data.name, { data, isOld, element });
  }

  /** Marks the rows that the picture shows. */
  mark(shown, beside) {
    this.places = { [beside]: "beside", [shown]: "shown" };
    this.show();
  }

  /** Draws once for all changes within a frame. */
  show() {
    this.drawing ??= new Promise((resolve) => setTimeout(() => {
      this.drawing = undefined;
      this.draw();
      resolve();
    }, 15));
    return this.drawing;
  }

  draw() {
    const rows = [...this.rows.values()].sort((one, other) => compare(one.data, other.data));
    for (const { data, isOld, element } of rows) {
      const place = this.places[data.name] ?? "";
      element.classList.toggle("old", isOld);
      if (place) element.setAttribute("aria-current", "true");
      else element.removeAttribute("aria-current");
      element.querySelector(".mark").textContent = place;
    }
    // Rows that are already in place are left alone: the user may be about to click one.
    if (rows.every(({ element }, n) => this.body.rows[n] === element)
      && rows.length === this.body.rows.length) return;
    const focused = document.activeElement?.closest("#table tr")?.dataset.name;
    this.body.replaceChildren(...rows.map(({ element }) => element));
    this.rows.get(focused)?.element.querySelector("button")?.focus({ preventScroll: true });
  }
}

function buildRow({ name, cells, fits, why }, source) {
  const isMade = cells.length > 0;
  const looks = isMade ? (fits ? "fits" : "over") : "none";
  // The rest of a source is a remark on its formulas.
  const words = source ? `Draw ${name}, from ${source.split(";")[0]}` : `Draw ${name}`;
  const title = isMade ? make("button", { type: "button", title: words }, name) : name;
  return make("tr", { "data-name": name, class: looks },
    make("th", { scope: "row" }, title, " ", make("span", { class: "mark" })),
    ...cells.map((cell) => make("td", {}, cell)),
    make("td", { class: "why", colspan: isMade ? 1 : 6 }, why));
}

/** Sorts schedules that fit first, then by time, then by peak memory. */
function compare(one, other) {
  // Times that differ only by rounding count as equal.
  const round = (value) => value === null ? Infinity : Number(value.toPrecision(9));
  const key = ({ cells, fits, time, peak }) =>
    [cells.length ? 0 : 1, fits ? 0 : 1, round(time), round(peak)];
  const [mine, its] = [key(one), key(other)];
  const first = mine.findIndex((value, n) => value !== its[n]);
  return first === -1 ? 0 : mine[first] < its[first] ? -1 : 1;
}
