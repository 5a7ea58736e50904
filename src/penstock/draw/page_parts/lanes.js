// One panel on one canvas, and the axis that panels share.

const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif";

/** The visible part of the time, shared by all panels of a unit. */
class Axis {
  constructor(unit, extent) {
    this.unit = unit;
    this.extent = extent;
    this.reset();
  }

  get length() { return this.end - this.start; }

  reset() { this.show(0, this.extent); }

  /** Zooms, keeping `about` in place; returns whether anything changed. */
  zoom(factor, about) {
    const length = this.clampLength(this.length * factor);
    const start = about - (about - this.start) * length / this.length;
    return this.show(start, length);
  }

  clampLength(length) { return clamp(length, this.extent * 1e-5, this.extent); }

  move(by) { return this.show(this.start + by, this.length); }

  show(start, length) {
    const before = [this.start, this.end];
    this.start = clamp(start, 0, this.extent - length);
    this.end = this.start + length;
    return this.start !== before[0] || this.end !== before[1];
  }

  /** Returns about `count` round times, with their labels. */
  ticks(count) {
    const power = 10 ** Math.floor(Math.log10(this.length / count));
    const step = power * [1, 2, 5, 10].find((round) => round * power >= this.length / count);
    const [factor, unit] = this.unit === "" ? [1, ""]
      : this.end < 1e-3 ? [1e6, " µs"] : this.end < 1 ? [1e3, " ms"] : [1, " s"];
    const decimals = Math.min(Math.max(0, -Math.floor(Math.log10(step * factor) + 1e-9)), 15);
    const found = [];
    for (let n = Math.ceil(this.start / step - 1e-9); n * step <= this.end * (1 + 1e-12); n++) {
      found.push({ time: n * step, label: (n * step * factor).toFixed(decimals) + unit });
    }
    return found;
  }
}

/** One panel on one canvas: the layout, the drawing, and what is at a point. */
class Lanes {
  constructor(panel, axis, textColour) {
    Object.assign(this, { panel, axis, textColour });
    const label = `${panel.title}: ${panel.summary}. ${KEYS}`;
    this.canvas = make("canvas", { tabindex: "0", role: "img", "aria-label": label });
  }

  /** Lays out the rows from the top. Many ranks get thin lanes, so that the canvas stays small. */
  layOut(width, withMemory, scale) {
    const { timeline, beneath, memory, measured } = this.panel;
    const many = timeline.lanes.length;
    const [tall, thin] = many <= 16 ? [24, 15] : many <= 48 ? [16, 11] : [9, 6];
    this.isWide = width >= 640;
    this.left = this.isWide ? 76 : 56;
    this.right = this.isWide ? 96 : 8;
    this.width = width;
    this.rows = [];
    let y = 20;
    timeline.lanes.forEach((lane, rank) => {
      const add = (row) => {
        this.rows.push({ rank, y, ...row });
        y += row.height + 2;
      };
      add({ role: "lane", height: tall, lane, timeline });
      const beside = timeline.collectives[rank];
      if (beside?.starts.length) add({ role: "sharding", height: thin, lane: beside, timeline });
      for (const other of beneath.filter(({ lanes }) => rank < lanes.length)) {
        add({ role: "beneath", height: thin, lane: other.lanes[rank], timeline: other });
      }
      if (withMemory) {
        y += 2;
        add({ role: "memory", height: thin + 3, curve: memory[rank],
          measured: measured[rank] });
      }
      y += this.rows.at(-1).role === "lane" ? 2 : 6;
    });
    this.bottom = y;
    this.height = y + 18;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(this.height * scale);
    this.canvas.style.aspectRatio = `${width} / ${this.height}`;
    this.scale = scale;
  }

  get plotWidth() { return Math.max(this.width - this.left - this.right, 1); }
  x(time) { return this.left + (time - this.axis.start) / this.axis.length * this.plotWidth; }
  time(x) { return this.axis.start + (x - this.left) / this.plotWidth * this.axis.length; }
  isInside(x) { return x >= this.left && x <= this.left + this.plotWidth; }

  /** Draws the panel. `hit` is what the pointer is at, on any panel; `pointerTime` may be NaN. */
  draw(colours, hit, pointerTime) {
    const pen = this.pen = this.canvas.getContext("2d");
    this.colours = colours;
    pen.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    pen.clearRect(0, 0, this.width, this.height);
    pen.textBaseline = "middle";
    this.drawMargins();
    pen.save();
    pen.beginPath();
    pen.rect(this.left, 0, this.plotWidth, this.bottom);
    pen.clip();
    for (const row of this.rows) {
      if (row.role === "memory") this.drawMemory(row);
      else this.drawBars(row, hit?.microbatch);
    }
    if (hit?.lanes === this) this.outline(hit);
    pen.restore();
    this.drawPointer(pointerTime);
  }

  drawMargins() {
    const { pen, colours, panel } = this;
    const middle = this.left + this.plotWidth + 8;
    const write = (text, x, y, size, align, colour) => {
      pen.font = `${size}px ${FONT}`;
      pen.textAlign = align;
      pen.fillStyle = colour;
      pen.fillText(text, x, y);
    };
    const names = { beneath: "simulated", sharding: "sharding", memory: "memory" };
    for (const { role, rank, y, height } of this.rows) {
      const size = Math.min(role === "lane" ? 13 : this.isWide ? 11 : 9, height);
      const colour = role === "lane" ? colours.ink : colours.muted;
      const name = role === "lane" ? `rank ${rank}` : names[role];
      write(name, this.left - 8, y + height / 2, size, "right", colour);
      if (!this.isWide || role === "beneath" || role === "sharding") continue;
      const amount = role === "lane" ? panel.bubbles[rank] : `peak ${panel.peaks[rank]}`;
      write(amount, middle, y + height / 2, size, "left", colour);
    }
    if (this.isWide) write("bubble", middle, 10, 11, "left", colours.muted);
    pen.fillStyle = colours.line;
    for (const { time, label } of this.axis.ticks(Math.max(this.plotWidth / 90, 3))) {
      const x = this.x(time);
      pen.fillRect(Math.round(x), 14, 1, this.bottom - 10);
      const half = label.length * 3.2;
      const inside = Math.min(Math.max(x, this.left + half - 6), this.width - half);
      write(label, inside, this.bottom + 11, 11.5, "center", colours.muted);
      pen.fillStyle = colours.line;
    }
  }

  /** Draws bars on a track; what remains of the track is idle time. */
  drawBars({ role, y, height, lane, timeline }, microbatch) {
    const { pen } = this;
    pen.fillStyle = this.colours.track;
    pen.fillRect(this.x(0), y, this.x(timeline.makespan) - this.x(0), height);
    pen.textAlign = "center";
    for (let n = countUpTo(lane.ends, this.axis.start); n < lane.starts.length; n++) {
      if (lane.starts[n] > this.axis.end) break;
      const [top, tall] = halfOf(lane.halves[n], y, height);
      const from = this.x(lane.starts[n]), width = this.x(lane.ends[n]) - from;
      // Wide bars have a gap. Between narrow bars that touch, the track must not show.
      const isLast = n + 1 === lane.starts.length;
      const touches = !isLast && this.x(lane.starts[n + 1]) - from - width < 0.25;
      const gap = width > 4 ? 1 : touches ? -0.5 : 0;
      const isMeant = microbatch === undefined || microbatch === lane.microbatches[n];
      pen.globalAlpha = isMeant ? 1 : 0.25;
      pen.fillStyle = timeline.colours[lane.kinds[n]][lane.stages[n]];
      pen.fillRect(from, top, Math.max(width - gap, 0.5), tall);
      if (width > 9 && tall >= 8 && role !== "sharding") this.writeIn(lane, n, from, width - gap, top, tall);
    }
    pen.globalAlpha = 1;
  }

  /** Writes the microbatch in the visible part if it fits, and the stage if there is more room. */
  writeIn(lane, n, from, width, top, tall) {
    const { pen } = this;
    const left = Math.max(from, this.left);
    const right = Math.min(from + width, this.left + this.plotWidth);
    const short = String(lane.microbatches[n]);
    const size = Math.min(12, tall - 1), letter = size * 0.58;
    const long = `${short} · stage ${lane.stages[n]}`;
    const text = [long, short].find((words) => words.length * letter + 3 <= right - left);
    if (text === undefined) return;
    pen.font = `${size}px ${FONT}`;
    pen.fillStyle = this.textColour;
    pen.fillText(text, (left + right) / 2, top + tall / 2 + 0.5);
  }

  drawMemory({ rank, y, height, curve, measured }) {
    const { pen, axis, colours, panel } = this;
    const base = y + height;
    const level = (amount) => base - (height - 1) * amount / panel.memory_scale;
    // The curve must not show a right edge before the step ends.
    const end = Math.min(axis.end + axis.length, panel.timeline.makespan);
    const path = new Path2D();
    path.moveTo(this.x(this.firstShown(curve)), base);
    this.climb(path, curve, level, end);
    path.lineTo(this.x(end), base);
    this.shade(path, colours.memory, 0.3);
    const cap = panel.caps[rank];
    if (cap <= panel.memory_scale) this.drawCap(path, y, level(cap), this.x(0), this.x(end));
    if (measured === undefined) return;
    const line = new Path2D();
    line.moveTo(this.x(this.firstShown(measured)), base);
    this.climb(line, measured, level, end);
    pen.strokeStyle = colours.ink;
    pen.lineWidth = 1;
    pen.stroke(line);
  }

  /** Returns the time of the last change before the axis, or of the first. */
  firstShown({ times }) {
    return times[Math.max(countUpTo(times, this.axis.start) - 1, 0)];
  }

  /** Adds the amounts of a curve to a path, up to the time `end`. */
  climb(path, { times, held }, level, end) {
    const { axis } = this;
    const first = Math.max(countUpTo(times, axis.start) - 1, 0);
    let amount = held[first];
    for (let n = first; n < times.length && times[n] <= axis.end; n++) {
      if (times[n] === times[n + 1]) continue; // An amount held for no time is a speck.
      path.lineTo(this.x(times[n]), level(amount));
      amount = held[n];
      path.lineTo(this.x(times[n]), level(amount));
    }
    path.lineTo(this.x(end), level(amount));
  }

  shade(path, colour, alpha) {
    const { pen } = this;
    pen.fillStyle = pen.strokeStyle = colour;
    pen.globalAlpha = alpha;
    pen.fill(path);
    pen.globalAlpha = 1;
    pen.lineWidth = 1;
    pen.stroke(path);
  }

  /** Draws the cap, and the memory above it in another colour. */
  drawCap(path, top, level, from, to) {
    const { pen, colours } = this;
    pen.save();
    pen.beginPath();
    pen.rect(from, top - 1, to - from, level - top + 0.5);
    pen.clip();
    this.shade(path, colours.over, 0.6);
    pen.restore();
    pen.setLineDash([4, 3]);
    pen.beginPath();
    pen.moveTo(from, level);
    pen.lineTo(to, level);
    pen.strokeStyle = colours.ink;
    pen.lineWidth = 1;
    pen.stroke();
    pen.setLineDash([]);
  }

  outline({ row, start, end, half }) {
    if (row.role === "memory") return;
    const [top, tall] = halfOf(half, row.y, row.height);
    const from = this.x(start), width = Math.max(this.x(end) - from, 2);
    this.pen.lineWidth = 1.5;
    this.pen.strokeStyle = this.colours.ink;
    this.pen.strokeRect(from + 0.25, top + 0.75, width - 1, tall - 1.5);
  }

  /** Draws a line at the pointer's time, on all panels of the axis. */
  drawPointer(time) {
    const x = this.x(time);
    if (!this.isInside(x)) return;
    this.pen.fillStyle = this.colours.muted;
    this.pen.fillRect(Math.round(x), 14, 1, this.bottom - 10);
    this.pen.font = `11px ${FONT}`;
    this.pen.textAlign = "center";
    this.pen.fillText(inWords(time, this.panel.time_unit), Math.max(x, this.left + 14), 7);
  }

  /** Returns the bar, the idle time or the memory at a point of the canvas, or null. */
  find(x, y) {
    const row = this.rows.find((row) => y >= row.y && y < row.y + row.height);
    const time = this.time(x);
    if (!row || !this.isInside(x)) return null;
    if (row.role === "memory") {
      const at = ({ times, held }) => held[countUpTo(times, time) - 1];
      const held = at(row.curve), measured = row.measured && at(row.measured);
      return time > this.panel.timeline.makespan ? null : { lanes: this, row, time, held, measured };
    }
    const { lane } = row;
    const next = countUpTo(lane.starts, time);
    const half = y < row.y + row.height / 2 ? "u" : "l";
    for (let n = next - 1; n >= 0 && n >= next - 2; n--) {
      if (time < lane.ends[n] && ["w", half].includes(lane.halves[n])) return this.bar(row, n);
    }
    const start = next > 0 ? lane.ends[next - 1] : 0;
    const end = next < lane.starts.length ? lane.starts[next] : row.timeline.makespan;
    return time > end ? null : { lanes: this, row, start, end, half: "w", next };
  }

  bar(row, n) {
    const { lane } = row;
    return {
      lanes: this, row, n, start: lane.starts[n], end: lane.ends[n], half: lane.halves[n],
      microbatch: lane.microbatches[n],
    };
  }
}

/** Returns the number of ascending `values` that are at most `limit`. */
function countUpTo(values, limit) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= limit) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Returns the top and the height of a whole bar (w), or of the upper (u) or lower (l) half. */
function halfOf(half, y, height) {
  return half === "w" ? [y, height] : [half === "u" ? y : y + height / 2 + 0.5, height / 2 - 0.5];
}

function clamp(value, least, most) { return Math.min(Math.max(value, least), most); }
