// Acting from a display in a cell: the menu and the keys of the table of actions, and their outcomes.

import type { Cluster } from "../cluster/client";
import { copyButton } from "../page/buttons";
import { plainDialogs } from "../page/dialogs";
import { h, setText } from "../page/dom";
import { phrase, say } from "../page/language";
import { type Item, openMenu } from "../page/menu";
import { askPanel } from "../page/notebook";
import { Actions, type Outcome, type Page } from "./actions";
import { answerOf } from "./answers";
import { ACTIONS, type Action, type Part, type Target } from "./table";

import "./incell.css";

/** Live parts are shown by the panel if there is one; answers are shown here. */
const LIVES: ReadonlySet<Part> = new Set(["logs", "timeline", "debugger"]);

export interface Shows {
  /** Shows the part that an action opens, in place of its text. */
  show?: Page["show"];
  /** Whether a cell can do the same: marimo has no magics. */
  code?: boolean;
}

export class InCell {
  readonly actions: Actions;
  /** The outcome of the last action. */
  readonly element: HTMLElement;

  constructor(
    private _cluster: Cluster,
    private _root: HTMLElement,
    private _shows: Shows = {},
  ) {
    const page: Page = {
      show: _shows.show ?? ((what, on) => this._show(what, on)),
      cell: () => "",
      writes: () => this._writes,
      write: (code, run) => askPanel(_root, "insert-code", { code, run }),
    };
    this.actions = new Actions(() => _cluster, page, plainDialogs(_root));
    this.actions.changed = (outcome) => this._said(outcome);
    const close = h("button", { class: "mnb-b mnb-quiet", type: "button", text: "×", "aria-label": say`close the answer`, onclick: () => (this._answer.hidden = true) });
    this._answer.append(this._text, close);
    this._insert.addEventListener("click", () => askPanel(_root, "insert-code", { code: this.actions.outcome.code }));
    this._done.append(this._code, copyButton(say`copy`, () => this.actions.outcome.code), this._insert);
    this.element = h("div", { class: "mnb-acted" }, this._message, this._done, this._answer);
    this._said(this.actions.outcome);
  }

  /** Opens the menu of a mesh or some of its ranks, at a point of the window. */
  menu(uid: string, ranks: number[] | null, x: number, y: number): void {
    const on = this._target(uid, ranks);
    if (!on) return;
    void this.actions.learn(); // so that the names are known when the code is shown
    const usable = ACTIONS.filter((action) => action.applies(on));
    const ending = usable.find((action) => action.ends);
    const items = usable.map((action): Item => ({ label: phrase(action.label), title: phrase(action.hint), key: action.key, apart: action === ending, run: () => void this.actions.act(action.name, uid, ranks) }));
    const code = (action: Action): Item => ({ label: this.actions.code(action, this._target(uid, ranks) ?? on).split("\n")[0] ?? "", title: phrase(action.label), run: () => void this.actions.insert(action.name, uid, ranks) });
    const more = this._shows.code === false ? null : { label: say`Code`, items: () => usable.map(code) };
    openMenu(this._root, { name: on.place, items, more }, x, y);
  }

  /** A button that opens the menu. */
  menuButton(text: string, on: () => { uid: string; ranks: number[] | null } | null): HTMLButtonElement {
    const button = h("button", { class: "mnb-b", type: "button", text, title: say`everything that can be done to it`, "aria-haspopup": "menu" });
    button.addEventListener("click", () => {
      const { left, bottom } = button.getBoundingClientRect();
      const target = on();
      if (target) this.menu(target.uid, target.ranks, left, bottom);
    });
    return button;
  }

  /** Executes the action of a key, with Shift shows its code; returns whether there is one. */
  key(event: KeyboardEvent, uid: string, ranks: number[] | null): boolean {
    const action = ACTIONS.find(({ key }) => key === event.key.toUpperCase());
    const on = this._target(uid, ranks);
    if (!action || !on || event.altKey || event.ctrlKey || event.metaKey) return false;
    if (event.shiftKey) void this.actions.insert(action.name, uid, ranks);
    else if (action.applies(on)) void this.actions.act(action.name, uid, ranks);
    return true;
  }

  private _target(uid: string, ranks: number[] | null): Target | null {
    return this._cluster.live ? this.actions.target(uid, ranks) : null;
  }

  private async _show(what: Part, on: Target): Promise<void> {
    const action = ACTIONS.find(({ does }) => "shows" in does && does.shows === what);
    const name = action?.name ?? "";
    const selection = { mesh: on.uid, ...(on.ranks && { ranks: on.ranks }) };
    if (LIVES.has(what) && askPanel(this._root, name, selection)) return this.actions.report(say`${phrase(action?.label ?? "")} of ${on.place}: in the panel`);
    this._answer.hidden = false;
    setText(this._text, say`asking …`);
    this._text.textContent = (await answerOf(this._cluster, what, on).catch((error: Error) => error.message)) || say`nothing`;
    this._text.scrollTop = 0;
  }

  private _said({ text, wrong, code }: Outcome): void {
    setText(this._message, text);
    this._message.classList.toggle("mnb-wrong", wrong);
    setText(this._code, code);
    this._done.hidden = !code || this._shows.code === false;
    this._insert.hidden = !this._writes;
  }

  /** Whether JupyterLab's panel shows this notebook. */
  private get _writes(): boolean {
    return this._root.closest(".mnb-live") !== null;
  }

  private _text = h("pre", { class: "mnb-lines", tabindex: "0", "aria-label": say`answer` });
  private _answer = h("div", { class: "mnb-answer", hidden: true });
  private _code = h("code");
  private _done = h("div", { class: "mnb-slice" });
  private _insert = h("button", { class: "mnb-b", type: "button", text: say`Insert code` });
  private _message = h("div", { class: "mnb-message", role: "status" });
}
