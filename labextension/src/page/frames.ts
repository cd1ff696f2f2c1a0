// Drawing before a frame: a few milliseconds in each, so that a page with many displays stays responsive.

export const BUDGET_MS = 2; // of scripts in a frame: style, layout and paint of what they change take several times as long

interface FrameQueue {
  add(draw: () => void): void;
  delete(draw: () => void): void;
}

/** The pending draws. A frame executes the first, and more while there is time; the others follow in later frames. */
export class Frames implements FrameQueue {
  add(draw: () => void): void {
    this._waiting.add(draw);
    this._wake();
  }

  delete(draw: () => void): void {
    this._waiting.delete(draw);
  }

  private _wake(): void {
    cancelAnimationFrame(this._handle);
    this._handle = requestAnimationFrame(() => this._run());
  }

  private _run(): void {
    const until = performance.now() + BUDGET_MS;
    try {
      for (const draw of [...this._waiting]) {
        if (!this._waiting.delete(draw)) continue; // cancelled by another
        draw();
        if (performance.now() >= until) break;
      }
    } finally {
      if (this._waiting.size) this._wake();
    }
  }

  private _handle = 0;
  private _waiting = new Set<() => void>();
}

const KEY = Symbol.for("monarch-nb.frames");

/** The queue of this page: the panel and the widgets of cells are bundles of their own, and share it. */
function shared(): FrameQueue {
  const page = document as { [KEY]?: FrameQueue };
  return (page[KEY] ??= new Frames());
}

/** Calls `draw` once in a frame, however often it is requested; `cancel` drops the request. */
export function eachFrame(draw: () => void): { soon: () => void; cancel: () => void } {
  const drawOnce = (): void => draw(); // two displays may have the same function
  return { soon: () => shared().add(drawOnce), cancel: () => shared().delete(drawOnce) };
}
