// The side panel: the cluster of the current notebook.

import { SidePanel } from "@jupyterlab/ui-components";
import type { Message } from "@lumino/messaging";
import { AccordionPanel, PanelLayout, Widget } from "@lumino/widgets";

import type { Actions } from "./actions";
import type { Cluster } from "../cluster/client";
import { h, setText } from "../page/dom";
import { say } from "../page/language";
import type { Front } from "./front";
import { icon } from "./icon";
import { NOTHING, phaseOf, wordsFor } from "./link";
import { DebugSection, FailureSection, FindingSection, HistorySection, KernelSection, LeftSection, LogSection, MeshSection, Section, SelectedSection, TensorSection, TimelineSection, TransferSection } from "./sections";
import { summaryOf } from "./summary";
import type { Part, Target } from "./table";

const KEPT = "monarch-nb:sections";

/** The sections that are open, as this browser has kept them. */
function openSections(): Set<string> {
  try {
    const kept = JSON.parse(localStorage.getItem(KEPT) ?? "null") as string[] | null;
    if (kept) return new Set(kept);
  } catch {
    // Nothing that can be read: as usual.
  }
  return new Set(["mnb-section-meshes", "mnb-section-selected"]);
}

function keepOpen(sections: readonly string[]): void {
  try {
    localStorage.setItem(KEPT, JSON.stringify(sections));
  } catch {
    // Where a page may store nothing, they are as usual in the next one.
  }
}

export interface PanelHooks {
  load(): void;
  spawn(): void;
  /** Opens the menu of what is selected. */
  menu(x: number, y: number): void;
}

export class MonarchPanel extends SidePanel {
  readonly meshes: MeshSection;
  readonly selected: SelectedSection;
  readonly logs = new LogSection();
  readonly failures = new FailureSection();
  readonly findings = new FindingSection();
  readonly timeline = new TimelineSection();

  constructor(
    private _front: Front,
    private _actions: Actions,
    hooks: PanelHooks,
  ) {
    super();
    this.id = "monarch-nb:panel";
    this.addClass("mnb-panel");
    this.title.icon = icon;
    this.title.caption = say`Monarch: the cluster of this notebook`;
    this.node.setAttribute("role", "region");
    this.node.setAttribute("aria-label", "Monarch");

    this._spawn.addEventListener("click", () => hooks.spawn());
    this._load.addEventListener("click", () => hooks.load());
    this._insertTyped.addEventListener("click", () => _front.insert(this._typed.textContent ?? ""));
    this._insert.addEventListener("click", () => _front.insert(_actions.outcome.code));
    this.node.addEventListener("keydown", (event) => event.key === "Escape" && !event.defaultPrevented && this._leave());

    const menu = (x: number, y: number): void => hooks.menu(x, y);
    const selected = (this.selected = new SelectedSection(_actions, menu));
    this.meshes = new MeshSection((row) => (selected.row = row), menu);
    this._sessions = new DebugSection(() => _front.notebook?.node ?? null);
    this._sections = [this.meshes, selected, this.failures, this.findings, this._sessions, this.timeline, new HistorySection(), this.logs, new TensorSection(), new TransferSection(), new LeftSection(_actions)];
    for (const section of this._sections) this.addWidget(section);
    const open = openSections();
    this._sections.forEach(({ id }, at) => !open.has(id) && this._accordion.collapse(at));
    this._accordion.setRelativeSizes(this._sections.map((_, at) => (at === 1 ? 3 : 4)));
    this._accordion.expansionToggled.connect((_, index) => this._opened(index));

    const head = new Widget({ node: h("div", { class: "mnb-v mnb-panel-head" }, h("div", { class: "mnb-top" }, this._name, this._spawn), this._summary) });
    const note = new Widget({ node: h("div", { class: "mnb-v mnb-panel-note", role: "status" }, this._noteTitle, this._noteText, this._typed, h("div", { class: "mnb-buttons" }, this._load, this._insertTyped)) });
    const foot = new Widget({ node: h("div", { class: "mnb-v mnb-panel-foot", role: "status" }, this._outcome, h("div", { class: "mnb-slice" }, this._code, this._insert)) });
    const layout = this.layout as PanelLayout;
    layout.insertWidget(0, head);
    layout.insertWidget(1, note);
    layout.addWidget(foot);
    this._note = note;
    this._foot = foot;

    _front.changed.connect(this._changed, this);
    _actions.changed.connect(this._showOutcome, this);
    this._showOutcome();
    this._changed();
  }

  /** Shows something about what an action is applied to, and gives it the keys. */
  showPart(what: Part, { uid, ranks }: Pick<Target, "uid" | "ranks">): void {
    const sections: Record<Part, Section> = { logs: this.logs, timeline: this.timeline, stacks: this.selected, findings: this.findings, debugger: this._sessions };
    this._accordion.expand(this._sections.indexOf(sections[what]));
    sections[what].focus();
    if (what === "logs") this.logs.follow(uid, ranks);
    else if (what === "stacks") void this.selected.showStacks(uid, ranks);
    else if (what === "timeline") void this.timeline.record(uid, ranks);
    else if (what === "findings") this.findings.ask(uid);
  }

  /** Lists the code of all that can be done to what is selected. */
  showCodes(): void {
    this._accordion.expand(this._sections.indexOf(this.selected));
    this.selected.codes = true;
  }

  /** Opens the section of findings, and looks for the reason why nothing makes progress. */
  ask(): void {
    this._accordion.expand(this._sections.indexOf(this.findings));
    this.findings.ask(undefined);
  }

  showFailures(): void {
    this._accordion.expand(this._sections.indexOf(this.failures));
  }

  /** Remembers which sections are open. Who opens a section wants to see it: those that were open before share what it leaves. */
  private _opened(index: number): void {
    const widgets = this._accordion.widgets;
    keepOpen(widgets.filter((widget) => !widget.isHidden).map(({ id }) => id));
    if (widgets[index]?.isHidden ?? true) return;
    this._accordion.setRelativeSizes(widgets.map((widget, at) => (widget.isHidden ? 0 : at === index ? 6 : at === 0 ? 3 : 2)));
  }

  /** The tree takes the keys, or the button that gets one, if no other part of the panel has them. */
  protected override onActivateRequest(message: Message): void {
    super.onActivateRequest(message);
    if (this.node.contains(document.activeElement)) return;
    if (!this.content.isHidden) this.meshes.focus();
    else (this._load.hidden ? this._spawn : this._load).focus();
  }

  /** Gives the keys to the tree, or from there to the notebook. */
  private _leave(): void {
    if (this.content.isHidden || this.meshes.node.contains(document.activeElement)) this._front.notebook?.activate();
    else this.meshes.focus();
  }

  private get _accordion(): AccordionPanel {
    return this.content as AccordionPanel;
  }

  private _changed(): void {
    const { connection, notebook } = this._front;
    const cluster = connection?.cluster ?? null;
    if (cluster !== this._cluster) {
      this._unwatch?.();
      this._cluster = cluster;
      for (const section of [...this._sections, ...this._brought]) section.cluster = cluster;
      this._actions.clear();
      this._unwatch = cluster?.watch(() => (this._pending ??= requestAnimationFrame(() => this._draw()))) ?? null;
    }
    setText(this._name, notebook?.title.label ?? "Monarch");
    this._name.title = notebook?.context.path ?? "";
    this._draw();
  }

  private _draw(): void {
    this._pending = null;
    this._bring();
    const facts = this._front.connection?.facts ?? NOTHING;
    const phase = phaseOf(facts);
    const live = phase === "live";
    const state = this._cluster?.state;
    const something = Boolean(state && (Object.keys(state.meshes).length || Object.keys(state.failures).length));
    const shown = something && (live || phase === "starting");
    const words = wordsFor(facts);
    this._note.setHidden(shown);
    this.content.setHidden(!shown);
    this._foot.setHidden(!live);
    setText(this._noteTitle, words.title);
    setText(this._noteText, words.text);
    setText(this._typed, words.code);
    this._typed.hidden = this._insertTyped.hidden = !words.code;
    this._load.hidden = !words.offersLoad;
    this._spawn.hidden = !live;
    setText(this._summary, !state || !live ? (shown ? say`last seen: ${words.title.toLowerCase()}` : "") : summaryOf(state).text);
    this._summary.title = this._summary.textContent ?? ""; // where the panel is narrow
    if (!state) return;
    this.failures.count(state);
    this._sessions.count(state);
  }

  /** Has a section for each view that the kernel has brought, behind those of the panel. */
  private _bring(): void {
    const wanted = this._cluster?.views ?? [];
    const same = ({ name, label }: KernelSection): boolean => wanted.some((view) => view.name === name && view.title === label);
    for (const section of this._brought.filter((each) => !same(each))) section.dispose();
    this._brought = this._brought.filter((section) => !section.isDisposed);
    for (const { name, title } of wanted) {
      if (this._brought.some((section) => section.name === name)) continue;
      const section = new KernelSection(name, title);
      section.cluster = this._cluster;
      this._brought.push(section);
      this.addWidget(section);
    }
  }

  private _showOutcome(): void {
    const { text, wrong, code } = this._actions.outcome;
    setText(this._outcome, text);
    this._outcome.title = text;
    this._outcome.classList.toggle("mnb-wrong", wrong);
    setText(this._code, code);
    this._insert.style.visibility = code ? "visible" : "hidden";
  }

  private _brought: KernelSection[] = [];
  private _cluster: Cluster | null = null;
  private _code = h("code");
  private _foot: Widget;
  private _insert = h("button", { class: "mnb-b", type: "button", text: say`Insert code`, title: say`insert this line into a new cell` });
  private _insertTyped = h("button", { class: "mnb-b", type: "button", text: say`Insert code`, title: say`insert this line into a new cell` });
  private _load = h("button", { class: "mnb-b mnb-primary", type: "button", text: say`Load Monarch` });
  private _name = h("b", { class: "mnb-panel-name" });
  private _note: Widget;
  private _noteText = h("div", { class: "mnb-dim" });
  private _noteTitle = h("b");
  private _outcome = h("div", { class: "mnb-panel-outcome" });
  private _pending: number | null = null;
  private _sections: Section[];
  private _sessions: DebugSection;
  private _spawn = h("button", { class: "mnb-b", type: "button", text: say`Spawn…`, title: say`make a mesh of processes` });
  private _summary = h("div", { class: "mnb-panel-summary", role: "status" });
  private _typed = h("code", { class: "mnb-typed" });
  private _unwatch: (() => void) | null = null;
}
