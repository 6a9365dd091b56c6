"use strict";
// The page of `duotone demo`. Text of models and users is set as text, never as HTML.

const by = (id) => document.getElementById(id);
let state = null;
let chosen = null;
let asking = null;

function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

function bytes(count) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
    if (count >= size) return `${(count / size).toFixed(2)} ${unit}`;
  return `${count} B`;
}

const seconds = (s) => (s < 1 ? `${(1e3 * s).toFixed(0)} ms` : `${s.toFixed(2)} s`);
const picture = (entry, n) => `picture/${entry.id}/${n}`;

async function answerOf(response) {
  const data = await response.json();
  if (!response.ok) throw new Error(data.error);
  return data;
}

const post = (path, data) => fetch(path, { method: "POST", body: JSON.stringify(data) });

// Pictures

function thumbnail(entry) {
  const button = make("button", { type: "button", title: entry.name },
    make("img", { src: picture(entry, 0), alt: "" }), entry.name);
  button.setAttribute("role", "option");
  button.dataset.id = entry.id;
  button.addEventListener("click", () => choose(entry));
  return button;
}

function addEntry(entry) {
  by("entries").querySelector(`[data-id="${entry.id}"]`)?.remove();
  by("entries").append(thumbnail(entry));
  choose(entry);
}

function choose(entry) {
  chosen = entry;
  const images = Array.from({ length: entry.pictures }, (_, n) =>
    make("img", { src: picture(entry, n), alt: `${entry.name}, picture ${n + 1}` }));
  by("shown").replaceChildren(...images);
  for (const button of by("entries").children) {
    button.setAttribute("aria-selected", button.dataset.id === entry.id);
    if (button.dataset.id === entry.id) button.scrollIntoView({ block: "nearest" });
  }
  by("suggestions").replaceChildren(...entry.questions.map((text) => {
    const button = make("button", { type: "button", className: "small", textContent: text });
    button.addEventListener("click", () => { by("question").value = text; ask(); });
    return button;
  }));
  by("question").value = entry.questions[0] ?? "";
  by("foreign").hidden = !(state.embedded && entry.id.startsWith("own-"));
}

async function upload(file) {
  if (file.size > state.most_bytes) {
    fail(`a picture must have at most ${state.most_bytes / 1e6} MB, got ${bytes(file.size)}`);
    return;
  }
  try {
    const path = `picture?name=${encodeURIComponent(file.name)}`;
    addEntry(await answerOf(await fetch(path, { method: "POST", body: file })));
    say("");
  } catch (error) { fail(error.message); }
}

async function draw(kind) {
  try { addEntry(await answerOf(await post("draw", { kind }))); } catch (error) { fail(error.message); }
}

// Schemes

function showScheme() {
  const scheme = state.schemes.find((s) => s.name === by("scheme").value);
  const options = scheme.bits.map((bits) =>
    make("option", { value: bits, textContent: bits, selected: bits === scheme.default }));
  by("bits").replaceChildren(...(options.length ? options : [make("option", { value: "", textContent: "its own" })]));
  by("bits").disabled = options.length < 2;
  by("summary").textContent = `${scheme.summary}.`.replace("..", ".");
  showTitles();
}

function schemeTitle() {
  const bits = by("bits").value;
  return bits ? `${by("scheme").value}, ${bits} bit${bits === "1" ? "" : "s"}` : by("scheme").value;
}

function showTitles() {
  side(0).querySelector("h2").textContent = "16 bit";
  side(1).querySelector("h2").textContent = schemeTitle();
}

// Answers

const side = (index) => by(`side-${index}`);

function clear() {
  for (const index of [0, 1]) {
    const text = side(index).querySelector(".text");
    text.className = "text";
    text.replaceChildren(make("span", { className: "busy", textContent: "..." }));
    for (const name of [".bytes", ".seconds"]) side(index).querySelector(name).textContent = "-";
    for (const bar of side(index).querySelectorAll(".bar i")) bar.style.width = "0";
    side(index).querySelector(".detail").textContent = "";
  }
  by("truth").textContent = "";
}

function say(text) {
  by("verdict").className = "";
  by("verdict").textContent = text;
}

function fail(text) {
  by("verdict").className = "failed";
  by("verdict").textContent = text;
}

function scaleBars(seen) {
  for (const [name, bar] of [["bytes", ".memory i"], ["seconds", ".time i"]]) {
    const most = Math.max(...seen.map((event) => event?.[name] ?? 0));
    seen.forEach((event, index) => {
      if (event) side(index).querySelector(bar).style.width = `${(100 * event[name]) / most}%`;
    });
  }
}

function showNumbers(event) {
  const place = side(event.side);
  place.querySelector(".text").textContent = event.text;
  place.querySelector(".bytes").textContent = bytes(event.bytes);
  place.querySelector(".seconds").textContent = seconds(event.seconds);
  const rate = event.ms_per_token ? `, ${event.ms_per_token.toFixed(1)} ms each` : "";
  place.querySelector(".detail").textContent = `${event.tokens} tokens${rate}`;
}

function showEnd(event) {
  showNumbers(event);
  const bits = event.memory.visual_bits_per_element || event.memory.bits_per_element;
  const what = event.memory.visual_bits_per_element ? "number of the pictures" : "number";
  side(event.side).querySelector(".detail").textContent += `; ${bits.toFixed(2)} true bits per ${what}`;
}

function verdict(done, ends) {
  if (done.same === null) return;
  const ratio = (part, dense) => ends[1].memory[dense] / ends[1].memory[part];
  const parts = [done.same ? "Word for word the same answer." : "The answers differ."];
  if (ends[1].memory.visual_bytes) {
    const times = ratio("visual_bytes", "visual_dense_equivalent_bytes");
    parts.push(`The pictures' cache is ${times.toFixed(1)}x smaller.`);
  }
  const times = ratio("total_bytes", "dense_equivalent_bytes");
  parts.push(times < 1 ? "The whole cache is not smaller: its tokens are in 16 bit."
    : `The whole cache is ${times.toFixed(1)}x smaller.`);
  say(parts.join(" "));
  if (!done.same) {
    const words = done.words.flatMap(([word, differs]) =>
      [differs ? make("mark", { textContent: word }) : word, " "]);
    side(1).querySelector(".text").replaceChildren(...words);
  }
  if (done.truth?.length) by("truth").textContent = `A right answer: ${done.truth[0]}`;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) yield JSON.parse(line);
  }
}

function handle(event, seen) {
  if (event.event === "waiting") say("Another question is being answered ...");
  if (event.event === "start") say(`Reading ${event.tokens} tokens, ${event.visual_tokens} of them visual ...`);
  if (event.event === "token" || event.event === "end") {
    seen[event.side] = event;
    (event.event === "end" ? showEnd : showNumbers)(event);
    scaleBars(seen);
  }
  if (event.event === "failed") {
    const text = side(event.side).querySelector(".text");
    text.classList.add("failed");
    text.textContent = event.message;
    say("");
  }
  if (event.event === "error") fail(event.message);
  if (event.event === "done") verdict(event, seen);
}

async function ask() {
  if (!by("form").reportValidity() || !chosen) return;
  asking?.abort();
  const mine = (asking = new AbortController());
  const bits = by("bits").value;
  const asked = {
    entry: chosen.id, question: by("question").value, scheme: by("scheme").value,
    bits: bits ? Number(bits) : null, later: by("later").checked,
  };
  clear();
  showTitles();
  say("");
  document.body.dataset.state = "asking";
  by("answers").scrollIntoView({ block: "nearest", behavior: "smooth" });
  try {
    const response = await fetch("ask", { method: "POST", body: JSON.stringify(asked), signal: mine.signal });
    if (!response.ok) await answerOf(response);
    const seen = [null, null];
    for await (const event of events(response)) if (!mine.signal.aborted) handle(event, seen);
  } catch (error) {
    if (mine.signal.aborted) return;
    clear();
    fail(error instanceof TypeError ? "The server does not answer; is duotone demo still running?" : error.message);
  }
  if (asking === mine) document.body.dataset.state = "answered";
}

async function begin() {
  for (const index of [0, 1]) side(index).append(by("side").content.cloneNode(true));
  state = await answerOf(await fetch("state"));
  const millions = (state.parameters / 1e6).toLocaleString("en", { maximumFractionDigits: 1 });
  by("model").textContent = `${state.model}, ${millions} million parameters, on ${state.device}.`;
  by("honest").textContent = (state.device === "cuda"
    ? "A scheme's first answer compiles its kernels; ask twice. "
    : "Without a GPU no kernels run: the few-bit cache saves memory here, and takes more time. ")
    + "Both sides take turns on one model. Time is each side's own: the question, quantizing and the answer."
    + (state.embedded ? " Schemes may order differently on your model: duotone evaluate measures it." : "");
  by("scheme").append(...state.schemes.map((s) => make("option", {
    value: s.name, disabled: Boolean(s.refused), title: s.refused || s.summary,
    textContent: s.refused ? `${s.name} (not for this model)` : s.name,
  })));
  by("scheme").value = state.scheme;
  showScheme();
  if (state.bits !== null) { by("bits").value = state.bits; showTitles(); }
  by("later-row").hidden = !state.can_ask_later;
  by("entries").append(...state.entries.map(thumbnail));
  choose(state.entries[0]);
  by("form").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
  by("scheme").addEventListener("change", showScheme);
  by("bits").addEventListener("change", showTitles);
  by("file").addEventListener("change", (event) => {
    if (event.target.files.length) upload(event.target.files[0]);
    event.target.value = "";
  });
  for (const button of document.querySelectorAll("[data-kind]"))
    button.addEventListener("click", () => draw(button.dataset.kind));
  document.body.addEventListener("dragover", (event) => event.preventDefault());
  document.body.addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files.length) upload(event.dataTransfer.files[0]);
  });
  document.body.dataset.state = "ready";
}

begin().catch((error) => fail(error.message));
