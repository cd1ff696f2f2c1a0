// The sections of a panel, and the parts of them that actions open.

import type { ClusterState } from "../cluster/state";
import type { Actions } from "./actions";
import { DebugSection, FailureSection, FindingSection, HistorySection, LeftSection, LogSection, MeshSection, type Section, SelectedSection, TensorSection, TimelineSection, TransferSection, VariableSection } from "./sections";
import type { Part, Target } from "./table";

export interface PartHooks {
  /** Opens the menu of the selection. */
  menu(x: number, y: number): void;
  /** Handles a key that the tree does not use; returns whether it did something. */
  key(event: KeyboardEvent): boolean;
  /** The element in which a prompt may be left. */
  area(): HTMLElement | null;
  /** Opens a section. */
  open(section: Section): void;
}

export class Parts {
  readonly meshes: MeshSection;
  readonly selected: SelectedSection;
  readonly failures = new FailureSection();
  readonly findings = new FindingSection();
  readonly left: LeftSection;
  readonly all: readonly Section[];

  constructor(actions: Actions, private _hooks: PartHooks, code = true) {
    const menu = (x: number, y: number): void => _hooks.menu(x, y);
    const selected = (this.selected = new SelectedSection(actions, menu, code));
    this.meshes = new MeshSection((row) => (selected.row = row), menu, (event) => _hooks.key(event));
    this._sessions = new DebugSection(() => _hooks.area());
    this.left = new LeftSection(actions);
    this.all = [this.meshes, selected, this.failures, this.findings, this._sessions, new VariableSection(), this._timeline, new HistorySection(), this._logs, new TensorSection(), new TransferSection(), this.left];
  }

  /** Shows a part for the target of an action, and focuses it. Rejects with the reason if that fails. */
  async show(part: Part, { uid, ranks }: Pick<Target, "uid" | "ranks">): Promise<void> {
    const sections: Record<Part, Section> = { logs: this._logs, timeline: this._timeline, stacks: this.selected, findings: this.findings, debugger: this._sessions };
    this._hooks.open(sections[part]);
    sections[part].focus();
    if (part === "logs") this._logs.follow(uid, ranks);
    else if (part === "stacks") await this.selected.showStacks(uid, ranks);
    else if (part === "timeline") await this._timeline.record(uid, ranks);
    else if (part === "findings") this.findings.ask(uid);
  }

  /** Shows the numbers of failures and stopped ranks in titles. */
  count(state: ClusterState): void {
    this.failures.count(state);
    this._sessions.count(state);
  }

  private _logs = new LogSection();
  private _sessions: DebugSection;
  private _timeline = new TimelineSection();
}
