// The debugger view: groups of stopped ranks, the source where they stand, values by rank, and what can be done.

import { askButton, h, plural, say } from "./words.js";

const MOVES = [
  ["next", "Next", "to the next line, over functions"],
  ["step", "Step", "to the next line, into functions"],
  ["return", "Return", "to the end of the function"],
  ["up", "Up", "look at the caller"],
  ["down", "Down", "look at what was called"],
];
const NOTHING = { stopped: 0, groups: [], tree: [], missing: [] };
const MANY_VALUES = 8;
const SHORT = 24; // characters of a value that shares a line with others
const SETTLED_MS = 300; // a step lets ranks go for a moment

/**
 * JupyterLab leaves the boxes of questions in the cell after the kernel has given them up: they are answered, with a comment
 * that stays to be read behind the prompt.
 */
function answerQuestions(area, text) {
  for (const box of area?.querySelectorAll(".jp-Stdin-input") ?? []) {
    // Another question, of the user's own `input()`, is none of ours.
    if (!box.closest(".jp-Stdin")?.textContent.includes("mdb ")) continue;
    box.value = `# ${text}`;
    box.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
  }
}

/**
 * Shows what is stopped. `options`: {folded: only the heading at first, below a prompt; area: gives the element in which
 * the prompt is, where it is not the cell of this view}. Gives a function that ends it.
 */
export function debugView(cluster, root, options) {
  let continued = false, settling = 0, ended = false, now = NOTHING, chosen = null, asked = 0, open = !options.folded, heard = false;
  const watched = [];
  root.classList.add("mnb-debug");

  const title = h("b", { role: "status", text: "…" });
  const message = h("div", { class: "mnb-message", role: "status" });
  const tell = (text, wrong) => {
    message.textContent = text;
    message.classList.toggle("mnb-wrong", Boolean(wrong));
  };
  const fold = h("button", { class: "mnb-b mnb-quiet", type: "button", "aria-label": "details", onclick: () => setOpen(!open) });
  const act = (what, label, hint) => askButton(label, () => request(what), tell, { title: hint, "data-do": what });
  const proceed = act("continue", "Continue", "continue these ranks");
  const buttons = h("span", { class: "mnb-tools", role: "toolbar", "aria-label": "debugger" }, proceed, ...MOVES.map((each) => act(...each)));
  const groups = h("div", { class: "mnb-groups", role: "group", "aria-label": "groups of ranks" });
  const source = h("div", { class: "mnb-source", role: "img" });
  const variables = h("table", { class: "mnb-vars" });
  const tree = h("div", { class: "mnb-tree" });
  const watches = h("div", { class: "mnb-watches" });
  const expression = h("input", { class: "mnb-b mnb-expr", type: "text", placeholder: "watch an expression", "aria-label": "watch an expression", spellcheck: "false" });
  expression.addEventListener("keydown", (event) => {
    event.stopPropagation(); // or the notebook takes letters for commands
    if (event.key === "Enter" && expression.value.trim()) watch(expression.value.trim());
  });
  const body = h(
    "div",
    { class: "mnb-body" },
    h("div", { class: "mnb-dleft" }, groups, source),
    h("div", { class: "mnb-dright" }, section("Variables", variables), section("Watched", watches, expression), section("Stacks", tree)),
  );
  root.append(h("div", { class: "mnb-top" }, h("span", {}, fold, title), buttons), body, message);

  function section(name, ...inside) {
    return h("details", { open: name !== "Stacks" }, h("summary", { text: name }), ...inside);
  }

  function setOpen(value) {
    open = value;
    fold.textContent = open ? "▾" : "▸";
    fold.setAttribute("aria-expanded", String(open));
    body.hidden = !open || !now.stopped;
    if (open) look();
  }

  // -- whom ------------------------------------------------------------------------------------------------------------

  function sessions() {
    const every = now.groups.flatMap((group) => group.sessions);
    const mine = chosen ? every.filter((one) => chosen.has(one)) : [];
    if (mine.length) return mine;
    chosen = null;
    const largest = now.groups.reduce((best, group) => (best && best.sessions.length >= group.sessions.length ? best : group), null);
    return largest ? largest.sessions : [];
  }

  function request(what, more = {}) {
    const whom = sessions();
    continued = what === "continue";
    chosen ??= what === "continue" ? null : new Set(whom); // they stay the ones, wherever they go from here
    return cluster.request("debug", { do: what, sessions: whom, ...more });
  }

  function shown() {
    const mine = new Set(sessions());
    return now.groups.find((group) => group.sessions.some((one) => mine.has(one)));
  }

  // -- drawing ---------------------------------------------------------------------------------------------------------

  function draw() {
    const count = now.groups.reduce((sum, group) => sum + group.ranks.length, 0);
    const opened = now.groups.filter((group) => group.post_mortem).reduce((sum, group) => sum + group.ranks.length, 0);
    const held = count - opened;
    const told = [held || !opened ? `${plural(held, "rank")} stopped` : "", opened ? `${plural(opened, "failed call")} opened` : ""];
    say(title, now.stopped ? told.filter(Boolean).join(", ") : heard ? "nothing is stopped" : late ? "…" : "not connected to the kernel");
    buttons.hidden = !now.stopped;
    fold.hidden = !now.stopped;
    body.hidden = !open || !now.stopped;
    if (!now.stopped) {
      tell("");
      return;
    }
    const mine = new Set(sessions());
    const row = (label, at, where, why, whom) =>
      h(
        "button",
        { type: "button", class: "mnb-group", "aria-pressed": String(whom.every((one) => mine.has(one)) && whom.length === mine.size), onclick: () => choose(whom) },
        h("b", { text: label }),
        h("span", { text: at }),
        h("span", { text: where }),
        h("span", { class: "mnb-dim", text: why, title: why }),
      );
    groups.replaceChildren(
      ...now.groups.map((group) =>
        row(
          group.of ? `${group.ranks.length} of ${group.of}` : String(group.ranks.length),
          `${group.file}:${group.line} ${group.function}`,
          `${group.name} ${group.where}`,
          group.note ? `${group.reason}; ${group.note}` : group.reason,
          group.sessions,
        ),
      ),
      ...(now.groups.length > 1 ? [row(`all ${count}`, "", "", "", now.groups.flatMap((group) => group.sessions))] : []),
      ...now.missing.map((one) => h("div", { class: "mnb-dim mnb-absent", text: `not stopped: ${one.name} ${one.where}${one.what ? `: ${one.what}` : ""}` })),
    );
    drawSource(shown());
    tree.replaceChildren(...now.tree.map(branch));
  }

  function choose(whom) {
    chosen = new Set(whom);
    draw();
    look();
  }

  function drawSource(group) {
    if (!group) return;
    const { first, lines, line, file, function: name } = group.source;
    source.setAttribute("aria-label", `${file}, line ${line} of ${name}: ${lines[line - first] ?? ""}`);
    source.replaceChildren(
      h("div", { class: "mnb-dim", text: `${file} · ${name}` }),
      ...lines.map((text, at) =>
        h("div", { class: first + at === line ? "mnb-here" : "" }, h("span", { class: "mnb-number", text: String(first + at) }), h("code", { text: text || " " })),
      ),
    );
  }

  function branch(node) {
    const below = node.below.map(branch);
    const heading = [h("b", { text: String(node.count) }), h("span", { text: node.function }), h("span", { class: "mnb-dim", text: `${node.file}:${node.line}` })];
    const ends = node.count > node.below.reduce((sum, one) => sum + one.count, 0);
    if (ends || node.below.length > 1) heading.push(h("span", { class: "mnb-dim", text: node.where }));
    return h("div", { class: "mnb-node" }, h("div", {}, ...heading), ...below);
  }

  // -- values ----------------------------------------------------------------------------------------------------------

  /** Asks for values by rank; answers that come after another question are dropped. */
  async function look() {
    if (!open || !now.stopped) return;
    const mine = ++asked;
    const whom = sessions();
    const everybody = now.groups.flatMap((group) => group.sessions);
    const questions = [cluster.request("debug", { do: "locals", sessions: whom })];
    for (const text of watched) questions.push(cluster.request("debug", { do: "eval", text, sessions: everybody }));
    const [locals, ...rest] = await Promise.allSettled(questions);
    if (mine !== asked || !now.stopped) return;
    drawVariables(locals.status === "fulfilled" ? locals.value.locals : [], whom.length);
    watches.replaceChildren(...watched.map((text, at) => watchRow(text, rest[at])));
  }

  function drawVariables(rows, count) {
    variables.replaceChildren(
      ...rows.map((row) => h("tr", {}, h("th", { scope: "row", text: row.name }), h("td", {}, ...valuesOf(row, count)))),
    );
    if (!rows.length) variables.append(h("tr", {}, h("td", { class: "mnb-dim", text: "none in this frame" })));
  }

  function valuesOf(row, count) {
    const parts = row.values.slice(0, MANY_VALUES).map((value) =>
      h(
        "div",
        { class: `${value.odd || value.unusual || value.error ? "mnb-odd" : ""} ${value.text.length <= SHORT ? "mnb-brief" : ""}` },
        h("code", { text: value.text }),
        ...(value.sessions.length < count ? [h("span", { class: "mnb-dim", text: value.where })] : []),
      ),
    );
    if (row.values.length > 1 && /[^·]/.test(row.spark)) parts.unshift(h("div", { class: "mnb-spark", text: row.spark }));
    if (row.values.length > MANY_VALUES) parts.push(h("div", { class: "mnb-dim", text: `… ${row.values.length - MANY_VALUES} more values` }));
    return parts;
  }

  function watch(text) {
    if (!watched.includes(text)) watched.push(text);
    expression.value = "";
    look();
  }

  function watchRow(text, answer) {
    const away = h("button", { type: "button", class: "mnb-b mnb-quiet", "aria-label": `stop watching ${text}`, text: "×", onclick: () => (watched.splice(watched.indexOf(text), 1), look()) });
    const inside = answer.status === "fulfilled" ? valuesOf(answer.value, answer.value.values.reduce((sum, one) => sum + one.sessions.length, 0)) : [h("span", { class: "mnb-wrong", text: answer.reason.message })];
    return h("div", { class: "mnb-watch" }, h("code", { class: "mnb-what", text }), h("div", {}, ...inside), away);
  }

  let late = setTimeout(() => ((late = 0), draw()), 4000);
  setOpen(open);
  draw();
  const end = cluster.subscribe({ topic: "debug" }, (told) => {
    const before = now;
    heard = true;
    now = told;
    draw();
    clearTimeout(settling);
    ended = !told.stopped && (ended || before.stopped > 0);
    if (ended && (options.folded || options.area)) {
      const area = options.area ? options.area() : root.closest(".jp-OutputArea"); // this view may be gone by then
      settling = setTimeout(() => {
        ended = false;
        answerQuestions(area, continued ? "continued" : "no rank is stopped any more");
      }, SETTLED_MS);
    }
    if (JSON.stringify([before.groups, before.stopped]) !== JSON.stringify([told.groups, told.stopped])) look();
  });
  return () => {
    end();
    clearTimeout(late);
  };
}
