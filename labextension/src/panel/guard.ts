// JupyterLab refuses to run cells, with a dialog, while a question of the kernel's waits for an answer. A prompt that the
// kernel has given up, because its ranks went on elsewhere, would keep it from running anything for good.

import type { ISessionContext } from "@jupyterlab/apputils";
import type { INotebookTracker, NotebookPanel } from "@jupyterlab/notebook";
import type { Kernel, KernelMessage, Session } from "@jupyterlab/services";

import { answerQuestions } from "../views/questions";
import { say } from "../page/language";

const id = (message: KernelMessage.IMessage): string => (message.parent_header as { msg_id?: string }).msg_id ?? "";

/** Drops the open question of a cell when the cell has ended. */
export class QuestionGuard {
  constructor(private _node: Element, context: ISessionContext) {
    this._take(context.session);
    context.sessionChanged.connect((_, { newValue }) => this._take(newValue));
    context.iopubMessage.connect((_, message) => this._published(message));
  }

  private _take(session: Session.ISessionConnection | null): void {
    this._session?.anyMessage.disconnect(this._passed, this);
    this._session = session;
    session?.anyMessage.connect(this._passed, this);
  }

  private _passed(_: Session.ISessionConnection, { msg, direction }: Kernel.IAnyMessageArgs): void {
    if (direction === "recv" && (msg.header.msg_type as string) === "input_request") this._asking = id(msg);
  }

  private _published(message: KernelMessage.IMessage): void {
    const { execution_state: state } = message.content as { execution_state?: string };
    if (message.header.msg_type !== "status" || state !== "idle" || !this._asking || id(message) !== this._asking) return;
    this._asking = "";
    const kernel = this._session?.kernel;
    if (!kernel?.hasPendingInput) return;
    answerQuestions(this._node, say`no rank is stopped any more`);
    kernel.removeInputGuard();
  }

  private _asking = ""; // the request of the cell with an open question
  private _session: Session.ISessionConnection | null = null;
}

/** Guards all present and future notebooks. */
export function guardQuestions(tracker: INotebookTracker): void {
  const guard = (panel: NotebookPanel): void => void new QuestionGuard(panel.node, panel.sessionContext);
  tracker.forEach(guard);
  tracker.widgetAdded.connect((_, panel) => guard(panel));
}
