// Notices of the end of a long cell or a call, for users who look elsewhere: the status bar, the tab's title, the desktop.

import { Notification as Toast } from "@jupyterlab/apputils";

import type { Ended } from "../cluster/messages";
import { duration } from "../page/words";
import { say } from "../page/language";
import type { Front } from "./front";

const SHOWN_MS = 30_000; // in the status bar, once the page is visible

export interface EndSettings {
  /** Long cells are announced on the desktop without %notify. */
  desktopNotifications: boolean;
}

/** `train.ipynb: In[5] ended after 2 min 03 s`. */
export function endedText({ what, seconds, error }: Ended, notebook: string): string {
  return `${notebook}: ${what} ${error ? "failed" : "ended"} after ${duration(seconds)}`;
}

/** The notifications of the desktop: the browser's own, except in tests. */
export interface Desktop {
  permission(): string;
  request(): Promise<string>;
  /** Shows a message in the page, with a button for a confirmation. */
  say(text: string, label?: string, agreed?: () => void): void;
  show(title: string, body: string, clicked: () => void): void;
}

export const BROWSER: Desktop = {
  permission: () => (typeof Notification === "undefined" ? "denied" : Notification.permission),
  request: () => Notification.requestPermission(),
  say: (text, label, agreed) => {
    if (label && agreed) Toast.info(text, { autoClose: false, actions: [{ label, callback: agreed }] });
    else Toast.warning(text, { autoClose: 8000 });
  },
  show: (title, body, clicked) => {
    const notification = new Notification(title, { body, tag: title });
    notification.onclick = () => {
      window.focus();
      clicked();
      notification.close();
    };
  },
};

export class EndNotices {
  constructor(
    front: Front,
    private _settings: EndSettings,
    private _status: (text: string, wrong: boolean) => void,
    private _activate: (notebook: { id: string }) => void,
    private _desktop: Desktop = BROWSER,
  ) {
    front.announced.connect((_, { notebook, message }) => {
      if (message.type === "notify") this.permit();
      else this.show(message, notebook);
    });
    document.addEventListener("visibilitychange", () => this._seen());
    window.addEventListener("focus", () => this._seen());
  }

  /** Asks for the permission to show notifications: at once where a person `acts`, else with a button, since browsers want a click or a key for that. */
  permit(acts = false): void {
    const permission = this._desktop.permission();
    if (permission === "default" && acts) return void this._desktop.request();
    if (permission === "denied") this._desktop.say(say`The browser does not let this page show notifications: allow them beside the page's address.`);
    if (permission === "default") this._desktop.say(say`Monarch: show on the desktop when long cells end?`, say`Allow notifications`, () => void this._desktop.request());
  }

  show(message: Ended, notebook: { id: string; title: { label: string } }): void {
    const text = endedText(message, notebook.title.label);
    const wrong = Boolean(message.error);
    this._status(text, wrong);
    if (!this._away()) {
      this._seen();
      return;
    }
    this._title ??= document.title;
    document.title = `${wrong ? "✕" : "✓"} ${text}`;
    if ((message.asked || this._settings.desktopNotifications) && this._desktop.permission() === "granted")
      this._desktop.show(text, message.error, () => this._activate(notebook));
  }

  private _away(): boolean {
    return document.hidden || !document.hasFocus();
  }

  private _seen(): void {
    if (this._away()) return;
    if (this._title !== null) document.title = this._title;
    this._title = null;
    clearTimeout(this._clearing);
    this._clearing = setTimeout(() => this._status("", false), SHOWN_MS);
  }

  private _clearing: ReturnType<typeof setTimeout> | undefined;
  private _title: string | null = null; // the tab's title before
}
