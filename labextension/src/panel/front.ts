// The notebook in front, and the connection to its cluster.

import { INotebookTracker, NotebookActions, NotebookPanel } from "@jupyterlab/notebook";
import { ISignal, Signal } from "@lumino/signaling";

import type { Ended, Notify } from "../cluster/messages";
import { Connection } from "./connection";
import { phaseOf } from "./link";

const LIVE_MS = 30_000; // for the connection to a kernel that has just loaded the extension

export interface Announced {
  notebook: NotebookPanel;
  message: Ended | Notify;
}

export class Front {
  notebook: NotebookPanel | null = null;
  connection: Connection | null = null;

  constructor(
    private _tracker: INotebookTracker,
    private _loadsAgain: () => boolean,
  ) {
    _tracker.currentChanged.connect(this._update, this);
    this._update();
  }

  /** Emitted for messages of a kernel that are no part of the state. */
  get announced(): ISignal<this, Announced> {
    return this._announced;
  }

  /** Emitted when another notebook is in front, or the state of its connection changes. */
  get changed(): ISignal<this, void> {
    return this._changed;
  }

  /** Puts code into a cell of its own below the active one; an active empty cell takes it. */
  insert(code: string): void {
    const notebook = this.notebook?.content;
    if (!notebook?.model) return;
    const { activeCell } = notebook;
    const empty = activeCell?.model.type === "code" && !activeCell.model.sharedModel.getSource().trim();
    if (!empty) NotebookActions.insertBelow(notebook);
    notebook.activeCell?.model.sharedModel.setSource(code);
    if (notebook.activeCell) void notebook.scrollToCell(notebook.activeCell);
  }

  /** The connection to the cluster of a notebook; null if it was never in front. */
  of(notebook: object): Connection | null {
    return this._connections.get(notebook as NotebookPanel) ?? null;
  }

  /** The source of the active cell; "" for other cells. */
  get cell(): string {
    const cell = this.notebook?.content.activeCell?.model;
    return cell?.type === "code" ? cell.sharedModel.getSource() : "";
  }

  /** Loads the extension into the kernel of the notebook in front, by a cell; resolves with whether its cluster can be reached. */
  async load(): Promise<boolean> {
    const { notebook } = this;
    if (!notebook) return false;
    await notebook.sessionContext.ready;
    await this.run("%load_ext monarch");
    const until = Date.now() + LIVE_MS;
    while (Date.now() < until && notebook === this.notebook) {
      if (this.connection && phaseOf(this.connection.facts) === "live") return true;
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
    return false;
  }

  /** Puts code into a cell of its own below the active one, and runs it. */
  async run(code: string): Promise<void> {
    this.insert(code);
    const { notebook } = this;
    if (notebook) await NotebookActions.run(notebook.content, notebook.sessionContext);
  }

  private _update(): void {
    const notebook = this._tracker.currentWidget;
    if (notebook === this.notebook) return;
    this.notebook = notebook;
    this.connection?.changed.disconnect(this._report, this);
    this.connection = notebook ? this._of(notebook) : null;
    this.connection?.changed.connect(this._report, this);
    this._report();
  }

  private _of(notebook: NotebookPanel): Connection {
    let connection = this._connections.get(notebook);
    if (!connection) {
      connection = new Connection(notebook.sessionContext, this._loadsAgain);
      this._connections.set(notebook, connection);
      connection.cluster.onMessage((message) => {
        if (message.type === "ended" || message.type === "notify") this._announced.emit({ notebook, message });
      });
      notebook.disposed.connect(() => {
        this._connections.get(notebook)?.dispose();
        this._connections.delete(notebook);
      });
    }
    return connection;
  }

  private _report(): void {
    // Buttons in saved outputs are shown where a kernel can act on them.
    this.notebook?.node.classList.toggle("mnb-live", Boolean(this.connection && phaseOf(this.connection.facts) === "live"));
    this._changed.emit();
  }

  private _announced = new Signal<this, Announced>(this);
  private _changed = new Signal<this, void>(this);
  private _connections = new Map<NotebookPanel, Connection>();
}
