// The connection from one notebook to the cluster of its kernel: a comm that is reopened whenever possible.

import type { ISessionContext } from "@jupyterlab/apputils";
import { Kernel, KernelMessage } from "@jupyterlab/services";
import { JSONObject } from "@lumino/coreutils";
import { IDisposable } from "@lumino/disposable";
import { ISignal, Signal } from "@lumino/signaling";

import { Cluster } from "../cluster/client";
import type { FromKernel } from "../cluster/messages";
import { BACK, GONE } from "../page/back";
import { say } from "../page/language";
import { Facts, NOTHING, mayLoad, phaseOf, wantsComm } from "./link";

const TARGET = "monarch_nb.cluster";
const PROTOCOL = 1;
const SUBSHELL_MS = 2000;
const INFO_MS = 800;
// A new page keeps what it sends for up to 3 s, or until it hears what kernel it is; and the cell may last for hours.
const OWN_MS = 15_000;
// JupyterLab ends the subshell of the last comm of a target a moment after that comm; a comm that is made in that moment
// gets the one that is ended, and speaks to nobody.
const PAUSE_MS = 300;
const ANSWER_MS = 8000;
// JupyterLab tries seven times, for about a minute, to connect to a kernel again, and then never; a proxy may be away longer.
const ANEW_MS = 5000;
const MOST_ANEW = 120;
const INSTALL = "%pip install 'monarch-nb[notebook] @ git+https://github.com/monarch-nb/monarch-nb'";
const EXTENSIONS = ["monarch", "monarch_nb"]; // the second where another package owns the first

export class Connection implements IDisposable {
  readonly cluster: Cluster;
  facts: Facts = { ...NOTHING, notebook: true };

  constructor(
    private _context: ISessionContext,
    private _loadsAgain: () => boolean,
  ) {
    this.cluster = new Cluster({
      send: (message) => {
        if (!this._comm || this.facts.comm !== "live") throw new Error(say`the kernel cannot be reached`);
        this._comm.send(message as JSONObject);
      },
      onMessage: (callback) => {
        this._receive = callback;
        return () => undefined;
      },
    });
    _context.kernelChanged.connect(this._kernelChanged, this);
    _context.statusChanged.connect(this._statusChanged, this);
    _context.connectionStatusChanged.connect(this._statusChanged, this);
    _context.iopubMessage.connect(this._heard, this);
    this._kernelChanged();
  }

  /** The facts have changed. */
  get changed(): ISignal<this, void> {
    return this._changed;
  }

  get isDisposed(): boolean {
    return this._disposed;
  }

  dispose(): void {
    if (this._disposed) return;
    this._disposed = true;
    Signal.clearData(this);
    if (this._soon) clearTimeout(this._soon);
    if (this._anew) clearTimeout(this._anew);
    this._forget();
  }

  /** Loads the extension into the kernel, outside of any cell. */
  async load(): Promise<void> {
    const kernel = this._kernel;
    if (!kernel || this.facts.loading) return;
    this._set({ loading: true, error: "" });
    let error = "";
    for (const name of EXTENSIONS) {
      try {
        const reply = await kernel.requestExecute({ code: `%load_ext ${name}`, store_history: false, allow_stdin: false }).done;
        error = reply.content.status === "error" ? `${reply.content.ename}: ${reply.content.evalue}` : "";
        if (/No module named '?monarch/.test(error)) error = say`monarch-nb is not installed where this kernel runs: ${INSTALL}`;
      } catch (problem) {
        error = String(problem);
      }
      if (kernel !== this._kernel) return;
      if (error) continue;
      this._forget();
      await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
      if (await this._open(kernel)) break;
    }
    this._loaded ||= this.facts.comm === "live";
    this._set({ loading: false, error: this.facts.comm === "live" ? "" : error || say`the kernel refused the connection` });
  }

  private get _kernel(): Kernel.IKernelConnection | null {
    return this._context.session?.kernel ?? null;
  }

  private _set(facts: Partial<Facts>): void {
    const before = JSON.stringify(this.facts);
    this.facts = { ...this.facts, ...facts };
    if (JSON.stringify(this.facts) === before || this._disposed) return;
    this._changed.emit();
    if (!wantsComm(this.facts) || this._soon) return;
    this._soon = setTimeout(() => {
      this._soon = null;
      if (this._kernel && wantsComm(this.facts)) void this._open(this._kernel);
    }, PAUSE_MS);
  }

  private _forget(): void {
    const comm = this._comm;
    this._comm = null;
    if (comm && !comm.isDisposed) {
      comm.onClose = () => undefined;
      comm.close();
    }
    this._leave();
    this._leave = () => undefined;
  }

  private _kernelChanged(): void {
    const kernel = this._kernel;
    if (kernel) this._lost(say`the kernel was changed`);
    else this._ended(say`the kernel was changed`);
    this._set({ kernel: Boolean(kernel), language: "", comm: "none", error: "", loading: false });
    if (kernel) {
      // A busy kernel answers later; its specification is known at once.
      void kernel.spec.then((spec) => kernel === this._kernel && !this.facts.language && this._set({ language: spec?.language ?? "" }));
      void kernel.info.then((info) => kernel === this._kernel && this._set({ language: info.language_info.name }));
    }
    this._statusChanged();
  }

  private _statusChanged(): void {
    const kernel = this._kernel;
    const status = kernel?.status ?? "unknown";
    const connected = kernel?.connectionStatus === "connected";
    if (status.endsWith("restarting") || status === "dead") {
      if (this.facts.comm !== "none") this._ended(say`the kernel was restarted`);
      this._set({ comm: "none", error: "", kernel: Boolean(kernel), status, connected });
      return;
    }
    const isReconnected = connected && !this.facts.connected && this.facts.comm === "live";
    this._set({ kernel: Boolean(kernel), status, connected });
    this._tryAgain();
    if (connected) this._tries = 0;
    else this._connectAnew();
    if (!isReconnected) return;
    this.cluster.recovered(); // messages in between may be lost
    document.dispatchEvent(new Event(BACK));
  }

  /** Where JupyterLab has given up a kernel whose cluster is shown. */
  private _connectAnew(): void {
    const kernel = this._kernel;
    if (kernel?.connectionStatus !== "disconnected" || !this._loaded || this._anew || this._tries >= MOST_ANEW) return;
    this._anew = setTimeout(() => {
      this._anew = null;
      if (kernel !== this._kernel || kernel.isDisposed || kernel.connectionStatus !== "disconnected") return;
      this._tries++;
      void kernel.reconnect().catch(() => undefined); // another change of its status shows the result
    }, ANEW_MS);
  }

  private _ended(why: string): void {
    document.dispatchEvent(new CustomEvent(GONE, { detail: this.cluster.engine }));
    this._lost(why);
  }

  private _lost(why: string): void {
    this._forget();
    this.cluster.lost(why, true);
  }

  /** Handles the end of a cell that may have loaded the extension. (The kernel's status does not show it: other messages end, too.) */
  private _heard(_: ISessionContext, message: KernelMessage.IMessage): void {
    if (this.facts.comm === "live") return;
    const cell = (message.parent_header as { msg_id?: string }).msg_id ?? "";
    const { code, execution_state: state } = message.content as { code?: string; execution_state?: string };
    if (message.header.msg_type === "execute_input" && mayLoad(code ?? "")) this._loads = cell;
    if (message.header.msg_type !== "status" || state !== "idle" || !cell || cell !== this._loads) return;
    this._loads = "";
    this._retry = true;
    this._tryAgain();
  }

  private _tryAgain(): void {
    if (!this._retry || this.facts.comm !== "refused" || this.facts.loading) return;
    this._retry = false;
    this._set({ comm: "none", error: "" });
  }

  /** Opens a comm; resolves with whether the kernel took it. */
  private async _open(kernel: Kernel.IKernelConnection): Promise<boolean> {
    this._forget();
    this._set({ comm: "opening" });
    const comm = kernel.createComm(TARGET);
    this._comm = comm;
    const leave = await subshell(kernel, comm);
    if (this._comm !== comm || comm.isDisposed) {
      leave();
      return false;
    }
    this._leave = leave;
    return new Promise((resolve) => {
      const deaf = setInterval(() => {
        if (this._comm === comm && this.facts.comm === "opening" && this.facts.status !== "idle") return; // the kernel is busy
        clearInterval(deaf);
        if (this._comm !== comm || this.facts.comm !== "opening") return;
        resolve(false);
        this._forget();
        this._set({ comm: "none" });
      }, ANSWER_MS);
      comm.onMsg = (message) => {
        if (this._comm !== comm) return;
        const data = message.content.data as unknown as FromKernel;
        const fresh = this.facts.comm !== "live";
        if (fresh) this.facts = { ...this.facts, comm: "live", error: "" };
        this._receive(data);
        if (!fresh) return;
        this._loaded = true;
        this._changed.emit();
        this.cluster.reconnected();
        resolve(true);
      };
      comm.onClose = () => {
        if (this._comm !== comm) return;
        this._comm = null; // JupyterLab ends it itself
        this._forget();
        this.cluster.lost(say`the kernel has closed the connection`, true);
        this._set({ comm: "refused" });
        resolve(false);
        this._tryAgain();
        if (this._loaded && this._loadsAgain() && phaseOf(this.facts) === "unloaded") {
          this._loaded = false;
          void this.load();
        }
      };
      comm.open({ protocol: PROTOCOL });
    });
  }

  private _anew: ReturnType<typeof setTimeout> | null = null;
  private _changed = new Signal<this, void>(this);
  private _comm: Kernel.IComm | null = null;
  private _disposed = false;
  private _leave: () => void = () => undefined;
  private _loaded = false;
  private _loads = ""; // the request of a cell that may load the extension
  private _receive: (message: FromKernel) => void = () => undefined;
  private _retry = false;
  private _soon: ReturnType<typeof setTimeout> | null = null;
  private _tries = 0; // since JupyterLab gave up
}

type Shelled = { subshellStarted?: Promise<void>; commsOverSubshells?: string; _subshellId?: string | null };

/** Waits until a comm can bypass a running cell, if possible; returns the function that ends this. */
async function subshell(kernel: Kernel.IKernelConnection, comm: Kernel.IComm): Promise<() => void> {
  const more = comm as unknown as Shelled;
  const nothing = (): void => undefined;
  if (!more.subshellStarted || more.commsOverSubshells === "disabled") return nothing;
  // Its status does not show it: it becomes idle after each message beside the cell, such as those of the page before.
  const ownShell = (await within(INFO_MS, kernel.info)) ? null : await ownSubshell(kernel, more);
  if (ownShell) return ownShell;
  const may = (kernel as unknown as { supportsSubshells?: boolean }).supportsSubshells;
  if (may) await within(SUBSHELL_MS, more.subshellStarted);
  return nothing;
}

/**
 * A page that is loaded while a cell runs does not know whether the kernel has subshells before the cell ends, and
 * JupyterLab asks for none. Its control channel answers meanwhile; a kernel without subshells does not reply.
 */
async function ownSubshell(kernel: Kernel.IKernelConnection, comm: Shelled): Promise<(() => void) | null> {
  const ask = (msgType: string, content: object): Promise<{ subshell_id?: string }> =>
    new Promise((resolve) => {
      const head = { msgType, channel: "control", username: kernel.username, session: kernel.clientId, content };
      const message = KernelMessage.createMessage(head as unknown as KernelMessage.IOptions<KernelMessage.IDebugRequestMsg>);
      const request = kernel.sendControlMessage(message as never, true, true);
      request.onReply = (reply) => resolve((reply as KernelMessage.IMessage).content as { subshell_id?: string });
    });
  const end = (id: string): void => {
    if (!kernel.isDisposed && kernel.connectionStatus === "connected") void ask("delete_subshell_request", { subshell_id: id });
  };
  const created = ask("create_subshell_request", {});
  const over = kernel.info.then(() => undefined);
  const id = (await within(OWN_MS, Promise.race([created, over])))?.subshell_id;
  if (!id) {
    void created.then(({ subshell_id }) => subshell_id && end(subshell_id)); // the reply came too late
    return null;
  }
  comm._subshellId = id;
  return () => void setTimeout(() => end(id), PAUSE_MS); // after the comm's end
}

/** The result of a promise, if it settles in time. */
function within<T>(ms: number, promise: Promise<T>): Promise<T | undefined> {
  return Promise.race([promise.catch(() => undefined), new Promise<undefined>((resolve) => setTimeout(() => resolve(undefined), ms))]);
}
