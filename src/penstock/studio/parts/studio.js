// The page of `penstock studio`: after each change of a field it requests the picture, the table
// and a searched schedule, and draws them. Text is inserted as text, never as HTML.
"use strict";

const PAUSE_MS = 100; // From the last key to the request.
const SLOW_MS = 300; // After this the page says that it is working.
const ADVICE_MS = 2000; // From all answers to the request for advice, which takes seconds of work.
const GONE = "The studio has stopped. Start it again with: penstock studio";
const DRAWN = ["notes", "said", "picture", "files", "python"];
const COMPARED = ["table", "bound", "tried", "advice"];

const byId = (id) => document.getElementById(id);
const start = JSON.parse(byId("start").textContent);
const form = new Form(byId("form"), start, changed);
const sources = Object.fromEntries(start.schedules.map(({ name, source }) => [name, source]));
const table = new Table(byId("table"), sources, (name) => {
  form.set("schedule", name);
  changed("chosen");
});
let timeline; // Set when the first picture comes.
let round; // The current round of requests, or the last one.
let beginning, keeping; // Timers.

/** The server does not answer. */
class Gone extends Error {}

/** The requests for one state of the fields. A later round aborts it. */
class Round {
  constructor() {
    this.query = form.query;
    this.needsSearch = ["schedule", "beside"].some((name) => form.get(name) === "searched");
    this.controller = new AbortController();
    this.problems = {};
    this.hasNext = false;
  }

  get isAborted() { return this.controller.signal.aborted; }
  abort() { this.controller.abort(); }

  /** Requests everything; a picture that needs a search comes last: nothing waits for it. */
  async run() {
    if (!this.needsSearch) await this.draw();
    if (this.hasNext) return;
    this.hasFound = await this.compare() && await this.search();
    if (this.needsSearch) await this.draw();
  }

  async draw() {
    this.isDrawing = !this.needsSearch;
    const began = performance.now();
    const slow = setTimeout(say, SLOW_MS, this.needsSearch ? "Searching …" : "Drawing …");
    try {
      const answer = await this.ask("picture");
      if (answer) {
        show(await this.read(answer.json()));
        say(`Drawn in ${Math.ceil(performance.now() - began)} ms.`);
      }
      dim(DRAWN, !answer);
    } finally {
      clearTimeout(slow);
      this.isDrawing = false;
    }
  }

  /** Fills the table row by row; returns whether that was possible. */
  async compare() {
    // If only the schedule cannot be drawn, others may still be compared.
    const drawn = ["schedule", "beside"];
    const isHopeless = Object.keys(this.problems).some((name) => !drawn.includes(name));
    const answer = isHopeless ? null : await this.ask("table");
    dim(COMPARED, !answer);
    if (!answer) return false;
    for (const id of ["bound", "tried", "advice"]) byId(id).replaceChildren(); // Of old fields.
    table.begin(form.get("clock"));
    for await (const line of this.lines(answer.body)) {
      if (line.problems) this.complain(line.problems);
      else if (line.bound === undefined) table.add(line);
      else byId("bound").textContent = line.bound;
    }
    table.end("searched");
    await table.show();
    return true;
  }

  async search() {
    byId("tried").textContent = "";
    byId("advice").replaceChildren();
    const isOn = form.get("search") !== "off";
    if (isOn) table.wait("searched");
    const answer = isOn ? await this.ask("search") : null;
    if (!answer) {
      await table.remove("searched");
      return false;
    }
    const found = await this.read(answer.json());
    byId("tried").textContent = found.note ?? "";
    await table.add(found);
    return true;
  }

  /** Says what limits the searched schedule, and what would help, if the fields stay as they are. */
  async advise() {
    if (!this.hasFound) return;
    await new Promise((resolve) => setTimeout(resolve, ADVICE_MS));
    if (this.isAborted) return;
    const answer = await this.ask("advice");
    if (!answer) return;
    const { advice } = await this.read(answer.json());
    byId("advice").replaceChildren(...advice.map((line) => make("li", {}, line)));
  }

  /** Returns the answer; if something is wrong with the fields, says so and returns null. */
  async ask(route) {
    const { signal } = this.controller;
    const answer = await this.read(fetch(`/${route}?${this.query}`, { signal, cache: "no-store" }));
    if (answer.headers.get("content-type") === "application/problem+json" || !answer.ok) {
      const unknown = { problems: { "": `The studio could not answer (${answer.status}).` } };
      this.complain((await this.read(answer.json().catch(() => unknown))).problems);
      return null;
    }
    form.complain(this.problems);
    return answer;
  }

  complain(problems) {
    Object.assign(this.problems, problems);
    const rest = form.complain(this.problems);
    say(rest || "Not drawn: something is wrong with a field.", true);
  }

  async *lines(body) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await this.read(reader.read());
      const texts = (rest + (value ?? "\n")).split("\n");
      rest = texts.pop();
      yield* texts.filter((text) => text !== "").map((text) => JSON.parse(text));
      if (done) return;
    }
  }

  /** Awaits a promise of the network. */
  async read(promise) {
    try {
      return await promise;
    } catch (error) {
      throw error instanceof SyntaxError ? error : new Gone(GONE, { cause: error });
    } finally {
      this.controller.signal.throwIfAborted();
    }
  }
}

/** Begins a round after a change; `how` is typed, chosen, or dragged by the slider. */
function changed(how) {
  document.body.dataset.state = "busy";
  clearTimeout(beginning);
  clearTimeout(keeping);
  keeping = setTimeout(keepAddress, 200);
  // While a slider is dragged, the picture follows as fast as it can: no drawing is aborted.
  if (how === "dragged" && round?.isDrawing && !round.isAborted) {
    round.hasNext = true;
    return;
  }
  round?.abort();
  beginning = setTimeout(begin, how === "typed" ? PAUSE_MS : 0);
}

async function begin() {
  const mine = round = new Round();
  let state;
  try {
    await mine.run();
    state = Object.keys(mine.problems).length ? "wrong" : "ready";
  } catch (error) {
    if (mine.isAborted) return;
    state = error instanceof Gone ? "gone" : "wrong";
    dim([...DRAWN, ...COMPARED], true);
    say(error instanceof Gone ? GONE : `The page has failed: ${error}`, true);
    if (state === "wrong") console.error(error);
  }
  if (mine.isAborted) return;
  if (mine.hasNext) return begin();
  document.body.dataset.state = state;
  keepAddress();
  if (state !== "ready") return;
  await mine.advise().catch((error) => {
    if (!mine.isAborted && !(error instanceof Gone)) console.error(error);
  });
}

/** Keeps the state of the fields in the address, so that it can be saved and shared. */
function keepAddress() {
  clearTimeout(keeping);
  const query = form.address;
  history.replaceState(null, "", location.pathname + (query && `?${query}`) + location.hash);
}

/** Draws the answer to /picture. */
function show({ page, notes, said, python, files }) {
  if (timeline) timeline.setData(page);
  else timeline = new Timeline(byId("picture"), page);
  table.mark(form.get("schedule"), form.get("beside"));
  for (const [id, lines] of Object.entries({ notes, said })) {
    byId(id).replaceChildren(...lines.map((line) => make("li", {}, line)));
  }
  byId("files").replaceChildren(
    ...files.map(({ label, href }) => make("a", { href, download: "" }, label)));
  byId("python").textContent = python;
  document.body.dataset.drawn = Number(document.body.dataset.drawn) + 1;
}

/** Makes results paler if they no longer match the fields. */
function dim(ids, isOld) {
  for (const id of ids) byId(id).classList.toggle("old", isOld);
}

function say(text, isWrong = false) {
  const status = byId("status");
  status.setAttribute("aria-live", isWrong ? "assertive" : "off"); // A picture is not announced.
  status.textContent = text;
  status.classList.toggle("wrong", isWrong);
}

async function copy() {
  const text = byId("python").textContent;
  // Without access to the clipboard the text is selected, to be copied by hand.
  const said = await navigator.clipboard.writeText(text).then(() => "copied", () => {
    getSelection().selectAllChildren(byId("python"));
    return "selected";
  });
  byId("copy").textContent = said;
  setTimeout(() => { byId("copy").textContent = "copy"; }, 1500);
}

byId("copy").addEventListener("click", copy);
byId("reset").addEventListener("click", () => {
  form.fill({});
  changed("chosen");
});
connectTheme(byId("theme"), () => timeline?.redraw());
const unknown = form.fill(Object.fromEntries(new URLSearchParams(location.search)));
byId("unknown").textContent = unknown.length
  ? `These parts of the address were not understood: ${unknown.join(", ")}.` : "";
changed("chosen");
