// The debugger view: groups of stopped ranks, their source, values by rank, and actions.

import type { Cluster } from "../cluster/client";
import type { DebugMessage, Group, Requests, StackNode, Value, Values } from "../cluster/messages";
import { askButton, messageLine } from "../page/buttons";
import { h, setText } from "../page/dom";
import { clock, plural } from "../page/words";
import { say } from "../page/language";
import { answerQuestions } from "./questions";
import type { View } from "./view";

import "./debugger.css";

const moves = (): [command: string, label: string, hint: string][] => [
  ["next", say`Next`, say`to the next line, over functions`],
  ["step", say`Step`, say`to the next line, into functions`],
  ["return", say`Return`, say`to the end of the function`],
  ["up", say`Up`, say`select the caller's frame`],
  ["down", say`Down`, say`select the called frame`],
];
const MANY_VALUES = 8;
const SHORT = 24; // characters of a value that shares a line with others
const SETTLED_MS = 300; // a step resumes ranks for a moment
const LATE_MS = 4000; // without an answer the kernel is gone

type Stops = Omit<DebugMessage, "type" | "id">;

const NOTHING: Stops = { stopped: 0, groups: [], tree: [], missing: [] };

/** `folded`: only the heading at first, below a prompt. `area` gives the element in which the prompt is, where it is not the cell of this view. */
export interface DebugOptions {
  folded?: boolean;
  area?: () => HTMLElement | null;
}

export const debugView: View<DebugOptions> = (cluster, root, options) => {
  const view = new DebugView(cluster, root, options);
  return () => view.end();
};

class DebugView {
  constructor(
    private _cluster: Cluster,
    private _root: HTMLElement,
    private _options: DebugOptions,
  ) {
    this._open = !_options.folded;
    const { message, report } = messageLine();
    this._report = report;
    const act = (command: string, label: string, hint: string): HTMLButtonElement => askButton(label, () => this._request(command), report, { title: hint, "data-do": command });
    this._buttons.append(act("continue", say`Continue`, say`continue these ranks`), ...moves().map((move) => act(...move)));
    this._fold.addEventListener("click", () => this._setOpen(!this._open));
    this._expression.addEventListener("keydown", (event) => {
      event.stopPropagation(); // else the notebook takes letters for commands
      const text = this._expression.value.trim();
      if (event.key === "Enter" && text) this._watch(text);
    });
    this._body.append(
      h("div", { class: "mnb-dleft" }, this._groups, this._source),
      h("div", { class: "mnb-dright" }, section(say`Variables`, this._variables), section(say`Watched`, this._watches, this._expression), section(say`Stacks`, this._tree)),
    );
    _root.classList.add("mnb-debug");
    _root.append(h("div", { class: "mnb-top" }, h("span", {}, this._fold, this._title), this._buttons), this._body, message);
    this._late = setTimeout(() => {
      this._late = null;
      this._draw();
    }, LATE_MS);
    this._setOpen(this._open);
    this._draw();
    this._unsubscribe = _cluster.subscribe({ topic: "debug" }, (stops) => this._take(stops));
  }

  end(): void {
    this._unsubscribe();
    if (this._late !== null) clearTimeout(this._late);
  }

  private _take(stops: DebugMessage): void {
    const before = this._stops;
    this._heard = true;
    this._stops = stops;
    this._draw();
    clearTimeout(this._settling);
    this._over = !stops.stopped && (this._over || before.stopped > 0);
    if (this._over && (this._options.folded || this._options.area)) {
      const area = this._options.area ? this._options.area() : this._root.closest(".jp-OutputArea"); // this view may be removed by then
      this._settling = setTimeout(() => {
        this._over = false;
        answerQuestions(area, this._continued ? "continued" : say`no rank is stopped any more`);
      }, SETTLED_MS);
    }
    if (JSON.stringify([before.groups, before.stopped]) !== JSON.stringify([stops.groups, stops.stopped])) void this._look();
  }

  private _setOpen(open: boolean): void {
    this._open = open;
    this._fold.textContent = open ? "▾" : "▸";
    this._fold.setAttribute("aria-expanded", String(open));
    this._body.hidden = !open || !(this._stops.stopped || this._keeps());
    if (open) void this._look();
  }

  // -- whom ----------------------------------------------------------------------------------------------------------

  private _every(): string[] {
    return this._stops.groups.flatMap((group) => group.sessions);
  }

  /** The chosen sessions while any of them is stopped; else the largest group. */
  private _sessions(): string[] {
    const sessions = this._every().filter((session) => this._chosen?.has(session));
    if (sessions.length) return sessions;
    this._chosen = null;
    const largest = this._stops.groups.reduce<Group | null>((best, group) => (best && best.sessions.length >= group.sessions.length ? best : group), null);
    return largest?.sessions ?? [];
  }

  private _request(command: string): Promise<Requests["debug"]["gives"]> {
    const sessions = this._sessions();
    this._continued = command === "continue";
    if (!this._continued) this._chosen ??= new Set(sessions); // they stay chosen wherever they stop next
    return this._cluster.request("debug", { do: command, sessions });
  }

  private _choose(sessions: readonly string[]): void {
    this._chosen = new Set(sessions);
    this._draw();
    void this._look();
  }

  // -- drawing -------------------------------------------------------------------------------------------------------

  private _draw(): void {
    const { stopped, groups, missing, tree } = this._stops;
    setText(this._title, this._heading());
    const keeps = this._keeps();
    this._buttons.hidden = !stopped;
    this._fold.hidden = !stopped && !keeps;
    this._body.hidden = !this._open || this._fold.hidden;
    this._body.inert = !stopped;
    this._root.classList.toggle("mnb-over", !stopped && keeps);
    if (!stopped) {
      if (keeps && this._looked !== this._shown) for (const stale of [this._variables, this._watches]) stale.replaceChildren(); // of a stop before
      return this._report("");
    }
    this._until = 0;
    this._shown = JSON.stringify(groups.map(({ file, line, sessions }) => [file, line, sessions]));
    const count = groups.reduce((sum, group) => sum + group.ranks.length, 0);
    this._groups.replaceChildren(
      ...groups.map((group) =>
        this._row(
          group.of ? `${group.ranks.length} of ${group.of}` : String(group.ranks.length),
          `${group.file}:${group.line} ${group.function}`,
          `${group.name} ${group.where}`,
          group.note ? `${group.reason}; ${group.note}` : group.reason,
          group.sessions,
        ),
      ),
      ...(groups.length > 1 ? [this._row(`all ${count}`, "", "", "", this._every())] : []),
      ...missing.map(({ name, where, what }) => h("div", { class: "mnb-dim mnb-absent", text: say`not stopped: ${name} ${where}${what ? `: ${what}` : ""}` })),
    );
    const selected = new Set(this._sessions());
    const current = groups.find((group) => group.sessions.some((session) => selected.has(session)));
    if (current) this._drawSource(current);
    this._tree.replaceChildren(...tree.map(branch));
  }

  /** Whether former stops stay visible: in cells, not in the panel, nor after a mere question. */
  private _keeps(): boolean {
    return !this._options.area && !this._options.folded && this._groups.childElementCount > 0;
  }

  private _heading(): string {
    const { stopped, groups } = this._stops;
    if (!stopped && this._keeps()) {
      this._until ||= this._cluster.now();
      return say`nothing is stopped any more; last state at ${clock(this._until)}`;
    }
    if (!stopped) return this._heard ? say`nothing is stopped` : this._late !== null ? "…" : say`not connected to the kernel`;
    const ranks = (some: readonly Group[]): number => some.reduce((sum, group) => sum + group.ranks.length, 0);
    const opened = ranks(groups.filter((group) => group.post_mortem));
    const count = ranks(groups) - opened;
    const parts = [count || !opened ? say`${plural(count, "rank")} stopped` : "", opened ? say`${plural(opened, "failed call")} opened` : ""];
    return parts.filter(Boolean).join(", ");
  }

  private _row(label: string, at: string, where: string, why: string, sessions: readonly string[]): HTMLButtonElement {
    const selected = new Set(this._sessions());
    const pressed = sessions.every((session) => selected.has(session)) && sessions.length === selected.size;
    return h(
      "button",
      { type: "button", class: "mnb-group", "aria-pressed": String(pressed), onclick: () => this._choose(sessions) },
      h("b", { text: label }),
      h("span", { text: at }),
      h("span", { text: where }),
      h("span", { class: "mnb-dim", text: why, title: why }),
    );
  }

  private _drawSource({ source }: Group): void {
    const { first, lines, line, file, function: name } = source;
    this._source.setAttribute("aria-label", say`${file}, line ${line} of ${name}: ${lines[line - first] ?? ""}`);
    this._source.replaceChildren(
      h("div", { class: "mnb-dim", text: `${file} · ${name}` }),
      ...lines.map((text, index) =>
        h("div", { class: first + index === line ? "mnb-here" : "" }, h("span", { class: "mnb-number", text: String(first + index) }), h("code", { text: text || " " })),
      ),
    );
  }

  // -- values --------------------------------------------------------------------------------------------------------

  /** Asks for values by rank; answers that arrive after another request are dropped. */
  private async _look(): Promise<void> {
    if (!this._open || !this._stops.stopped) return;
    const question = ++this._questions;
    const [sessions, every] = [this._sessions(), this._every()];
    const session = this._shown;
    const watched = [...this._watched];
    const [locals, ...values] = await Promise.allSettled([
      this._cluster.request("debug", { do: "locals", sessions }),
      ...watched.map((text) => this._cluster.request("debug", { do: "eval", text, sessions: every })),
    ]);
    if (question !== this._questions || !this._stops.stopped) return;
    this._looked = session;
    this._drawVariables(locals.status === "fulfilled" ? (locals.value.locals ?? []) : [], sessions.length);
    this._watches.replaceChildren(...watched.map((text, index) => this._watchRow(text, values[index] as PromiseSettledResult<Partial<Values>>)));
  }

  private _drawVariables(rows: readonly (Values & { name: string })[], count: number): void {
    this._variables.replaceChildren(...rows.map((row) => h("tr", {}, h("th", { scope: "row", text: row.name }), h("td", {}, ...valuesOf(row, count)))));
    if (!rows.length) this._variables.append(h("tr", {}, h("td", { class: "mnb-dim", text: say`none in this frame` })));
  }

  private _watch(text: string): void {
    this._watched.add(text);
    this._expression.value = "";
    void this._look();
  }

  private _watchRow(text: string, answer: PromiseSettledResult<Partial<Values>>): HTMLElement {
    const forget = (): void => {
      this._watched.delete(text);
      void this._look();
    };
    const away = h("button", { type: "button", class: "mnb-b mnb-quiet", "aria-label": say`stop watching ${text}`, text: "×", onclick: forget });
    const inside = answer.status === "fulfilled" ? watchedOf(answer.value) : [h("span", { class: "mnb-wrong", text: (answer.reason as Error).message })];
    return h("div", { class: "mnb-watch" }, h("code", { class: "mnb-what", text }), h("div", {}, ...inside), away);
  }

  private _body = h("div", { class: "mnb-body" });
  private _buttons = h("span", { class: "mnb-tools", role: "toolbar", "aria-label": say`debugger` });
  private _chosen: Set<string> | null = null;
  private _continued = false;
  private _expression = h("input", { class: "mnb-b mnb-expr", type: "text", placeholder: say`watch an expression`, "aria-label": say`watch an expression`, spellcheck: "false" });
  private _fold = h("button", { class: "mnb-b mnb-quiet", type: "button", "aria-label": say`details` });
  private _groups = h("div", { class: "mnb-groups", role: "group", "aria-label": say`groups of ranks` });
  private _heard = false;
  private _late: ReturnType<typeof setTimeout> | null;
  private _open: boolean;
  private _looked = ""; // the stops whose variables were fetched last,
  private _shown = ""; // and the displayed stops
  private _until = 0; // when the last displayed thread resumed
  private _over = false; // nothing is stopped, but the prompt does not know yet
  private _questions = 0;
  private _settling: ReturnType<typeof setTimeout> | undefined;
  private _source = h("div", { class: "mnb-source", role: "img" });
  private _stops: Stops = NOTHING;
  private _report: (text: string) => void;
  private _title = h("b", { role: "status", text: "…" });
  private _tree = h("div", { class: "mnb-tree" });
  private _unsubscribe: () => void;
  private _variables = h("table", { class: "mnb-vars" });
  private _watched = new Set<string>();
  private _watches = h("div", { class: "mnb-watches" });
}

function section(name: string, ...inside: HTMLElement[]): HTMLElement {
  return h("details", { open: name !== "Stacks" }, h("summary", { text: name }), ...inside);
}

/** The stacks of all, merged: a node of the tree with its children. */
function branch(node: StackNode): HTMLElement {
  const heading = [h("b", { text: String(node.count) }), h("span", { text: node.function }), h("span", { class: "mnb-dim", text: `${node.file}:${node.line}` })];
  const ends = node.count > node.below.reduce((sum, below) => sum + below.count, 0);
  if (ends || node.below.length > 1) heading.push(h("span", { class: "mnb-dim", text: node.where }));
  return h("div", { class: "mnb-node" }, h("div", {}, ...heading), ...node.below.map(branch));
}

function watchedOf({ spark = "", values = [] }: Partial<Values>): HTMLElement[] {
  return valuesOf({ spark, values }, values.reduce((sum, value) => sum + value.sessions.length, 0));
}

/** The values of one name; values that not all `count` sessions share have their ranks. */
function valuesOf({ spark, values }: Values, count: number): HTMLElement[] {
  const parts: HTMLElement[] = values.slice(0, MANY_VALUES).map((value) => valueOf(value, count));
  if (values.length > 1 && /[^·]/.test(spark)) parts.unshift(h("div", { class: "mnb-spark", text: spark }));
  if (values.length > MANY_VALUES) parts.push(h("div", { class: "mnb-dim", text: say`… ${values.length - MANY_VALUES} more values` }));
  return parts;
}

function valueOf(value: Value, count: number): HTMLElement {
  const odd = value.odd || value.unusual || value.error ? "mnb-odd" : "";
  const brief = value.text.length <= SHORT ? "mnb-brief" : "";
  const whose = value.sessions.length < count ? h("span", { class: "mnb-dim", text: value.where }) : null;
  return h("div", { class: `${odd} ${brief}` }, h("code", { text: value.text }), whose);
}
