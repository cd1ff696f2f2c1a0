// The side panel: the cluster of the current notebook.

import { SidePanel } from "@jupyterlab/ui-components";
import type { Message } from "@lumino/messaging";
import { AccordionPanel, PanelLayout, Widget } from "@lumino/widgets";

import type { Actions } from "./actions";
import type { Cluster } from "../cluster/client";
import { h, setText } from "../page/dom";
import { eachFrame } from "../page/frames";
import { say } from "../page/language";
import type { Front } from "./front";
import { icon } from "./icon";
import { KernelSection } from "./kernelview";
import { NOTHING, phaseOf, wordsFor } from "./link";
import { keepOpen, openSections } from "./open";
import { Parts } from "./parts";
import type { Section } from "./sections";
import { summaryOf } from "./summary";

const TITLE = 24; // px: as high as a row of the tree, so that ten closed sections leave it some room

/** A section as a widget, which reports its visibility. */
class SectionWidget extends Widget {
  constructor(readonly section: Section) {
    super({ node: section.node });
    this.id = `mnb-section-${section.id}`;
    this.title.label = section.label;
    section.renamed = (label) => (this.title.label = label);
  }

  protected override onAfterShow(message: Message): void {
    super.onAfterShow(message);
    this.section.shown = true;
  }

  protected override onAfterAttach(message: Message): void {
    super.onAfterAttach(message);
    if (this.isVisible) this.section.shown = true;
  }

  protected override onBeforeHide(message: Message): void {
    this.section.shown = false;
    super.onBeforeHide(message);
  }

  protected override onBeforeDetach(message: Message): void {
    this.section.shown = false;
    super.onBeforeDetach(message);
  }
}

export interface PanelHooks {
  load(): void;
  spawn(): void;
  /** Opens the menu of the selection. */
  menu(x: number, y: number): void;
}

export class MonarchPanel extends SidePanel {
  readonly parts: Parts;

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

    this.parts = new Parts(_actions, {
      menu: (x, y) => hooks.menu(x, y),
      key: () => false, // they are bindings of commands
      area: () => _front.notebook?.node ?? null,
      open: (section) => this._expand(section),
    });
    this._accordion.titleSpace = TITLE;
    const sections = this.parts.all;
    for (const section of sections) this.addWidget(new SectionWidget(section));
    const open = openSections();
    sections.forEach(({ id }, position) => !open.has(id) && this._accordion.collapse(position));
    this._accordion.setRelativeSizes(sections.map((_, index) => (index === 1 ? 3 : 4)));
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
    _actions.changed = () => this._showOutcome();
    this._showOutcome();
    this._changed();
  }

  /** Lists the code of all actions on the selection. */
  showCodes(): void {
    this._expand(this.parts.selected);
    this.parts.selected.codes = true;
  }

  /** Opens the section of findings, and asks why nothing makes progress. */
  ask(): void {
    this._expand(this.parts.findings);
    this.parts.findings.ask(undefined);
  }

  showFailures(): void {
    this._expand(this.parts.failures);
  }

  private _expand(section: Section): void {
    this._accordion.expand(this.parts.all.indexOf(section));
  }

  /** Remembers which sections are open. A newly opened section gets most of the room; the others share the rest. */
  private _opened(index: number): void {
    const widgets = this._accordion.widgets;
    keepOpen(widgets.flatMap((widget) => (widget.isHidden || !(widget instanceof SectionWidget) ? [] : [widget.section.id])));
    if (widgets[index]?.isHidden ?? true) return;
    this._accordion.setRelativeSizes(widgets.map((widget, position) => (widget.isHidden ? 0 : position === index ? 6 : position === 0 ? 3 : 2)));
  }

  /** Focuses the tree, or the button that opens a cluster, unless another part of the panel has the focus. */
  protected override onActivateRequest(message: Message): void {
    super.onActivateRequest(message);
    if (this.node.contains(document.activeElement)) return;
    if (this._note.isHidden) this.parts.meshes.focus();
    else (this._load.hidden ? this._spawn : this._load).focus();
  }

  /** Moves the focus to the tree, or from there to the notebook. */
  private _leave(): void {
    if (this.content.isHidden || this.parts.meshes.node.contains(document.activeElement)) this._front.notebook?.activate();
    else this.parts.meshes.focus();
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
      for (const section of [...this.parts.all, ...this._brought.map(({ section }) => section)]) section.cluster = cluster;
      this._actions.report("");
      this._unwatch = cluster?.watch(() => this._frames.soon()) ?? null;
    }
    setText(this._name, notebook?.title.label ?? "Monarch");
    this._name.title = notebook?.context.path ?? "";
    this._draw();
  }

  private _draw(): void {
    this._bring();
    const facts = this._front.connection?.facts ?? NOTHING;
    const phase = phaseOf(facts);
    const live = phase === "live";
    if (!live) this._looked = null; // another kernel may follow
    const state = this._cluster?.state;
    const something = Boolean(state && (Object.keys(state.meshes).length || Object.keys(state.failures).length));
    const isShown = something && (live || phase === "starting");
    const words = wordsFor(facts);
    const runsElsewhere = live && !something && this._runsElsewhere();
    this._note.setHidden(isShown);
    const appears = runsElsewhere && this.content.isHidden;
    this._note.toggleClass("mnb-small", runsElsewhere);
    this.content.setHidden(!isShown && !runsElsewhere);
    if (appears) {
      this._accordion.expand(this.parts.all.indexOf(this.parts.left));
      this._accordion.fit();
    }
    this._foot.setHidden(!live);
    setText(this._noteTitle, words.title);
    setText(this._noteText, words.text);
    setText(this._typed, words.code);
    this._typed.hidden = this._insertTyped.hidden = !words.code;
    this._load.hidden = !words.offersLoad;
    this._spawn.hidden = !live;
    setText(this._summary, !state || !live ? (isShown ? say`last seen: ${words.title.toLowerCase()}` : "") : summaryOf(state).text);
    this._summary.title = this._summary.textContent ?? ""; // where the panel is narrow
    if (!state) return;
    this.parts.count(state);
  }

  /** Whether anything runs without this kernel, which is shown even if the kernel has no mesh. Checked once. */
  private _runsElsewhere(): boolean {
    const cluster = this._cluster;
    if (!cluster || this._looked === cluster) return this._others;
    this._looked = cluster;
    this._others = false;
    void Promise.all([cluster.request("left", {}), cluster.request("jobs", {})])
      .then(([{ meshes }, { jobs }]) => {
        if (this._looked !== cluster) return;
        this._others = meshes.length + jobs.length > 0;
        this._draw();
      })
      .catch(() => undefined);
    return false;
  }

  /** Adds a section for each view of the kernel, after those of the panel. */
  private _bring(): void {
    const views = this._cluster?.views ?? [];
    const isWanted = ({ section: { id, label } }: SectionWidget): boolean => views.some(({ name, title }) => id === `view-${name}` && title === label);
    for (const widget of this._brought.filter((brought) => !isWanted(brought))) widget.dispose();
    this._brought = this._brought.filter((widget) => !widget.isDisposed);
    for (const { name, title } of views) {
      if (this._brought.some(({ section }) => section.id === `view-${name}`)) continue;
      const widget = new SectionWidget(new KernelSection(name, title));
      widget.section.cluster = this._cluster;
      this._brought.push(widget);
      this.addWidget(widget);
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

  private _brought: SectionWidget[] = [];
  private _cluster: Cluster | null = null;
  private _code = h("code");
  private _foot: Widget;
  private _frames = eachFrame(() => this._draw());
  private _insert = h("button", { class: "mnb-b", type: "button", text: say`Insert code`, title: say`insert this line into a new cell` });
  private _insertTyped = h("button", { class: "mnb-b", type: "button", text: say`Insert code`, title: say`insert this line into a new cell` });
  private _load = h("button", { class: "mnb-b mnb-primary", type: "button", text: say`Load Monarch` });
  private _name = h("b", { class: "mnb-panel-name" });
  private _note: Widget;
  private _noteText = h("div", { class: "mnb-dim" });
  private _noteTitle = h("b");
  private _looked: Cluster | null = null;
  private _others = false;
  private _outcome = h("div", { class: "mnb-panel-outcome" });
  private _spawn = h("button", { class: "mnb-b", type: "button", text: say`Spawn…`, title: say`make a mesh of processes` });
  private _summary = h("div", { class: "mnb-panel-summary", role: "status" });
  private _typed = h("code", { class: "mnb-typed" });
  private _unwatch: (() => void) | null = null;
}
