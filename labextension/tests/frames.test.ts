// Displays share the time of a frame.

import { beforeEach, describe, expect, it, vi } from "vitest";

import { BUDGET_MS, Frames, eachFrame } from "../src/page/frames";
import { frame } from "./made";

let clock: number;
let requested: (() => void) | null;

/** The next frame of the page; whether one was asked for. */
function next(): boolean {
  const run = requested;
  requested = null;
  run?.();
  return run !== null;
}

describe("what is drawn in a frame", () => {
  beforeEach(() => {
    clock = 0;
    requested = null;
    const now = vi.spyOn(performance, "now").mockImplementation(() => clock);
    vi.stubGlobal("requestAnimationFrame", (run: () => void) => ((requested = run), 1));
    vi.stubGlobal("cancelAnimationFrame", () => (requested = null));
    return () => {
      vi.unstubAllGlobals();
      now.mockRestore();
    };
  });

  it("is all that there is time for; the rest follows, first come first", () => {
    const frames = new Frames();
    const drawn: string[] = [];
    for (const name of ["a", "b", "c"])
      frames.add(() => {
        drawn.push(name);
        clock += BUDGET_MS * 0.6;
      });
    next();
    expect(drawn).toEqual(["a", "b"]);
    next();
    expect(drawn).toEqual(["a", "b", "c"]);
    expect(next()).toBe(false);
  });

  it("is not drawn again before the next frame, however soon it asks", () => {
    const frames = new Frames();
    let count = 0;
    const draw = (): void => {
      count++;
      frames.add(draw);
    };
    frames.add(draw);
    next();
    expect(count).toBe(1);
    next();
    expect(count).toBe(2);
  });

  it("is drawn also where another display fails", () => {
    const frames = new Frames();
    const other = vi.fn();
    frames.add(() => {
      throw new Error("wrong");
    });
    frames.add(other);
    expect(next).toThrow("wrong");
    next();
    expect(other).toHaveBeenCalledOnce();
  });

  it("leaves out what is cancelled by what is drawn before", () => {
    const frames = new Frames();
    const other = vi.fn();
    frames.add(() => frames.delete(other));
    frames.add(other);
    next();
    expect(other).not.toHaveBeenCalled();
  });
});

it("a display is drawn once for all that was asked, and not at all when cancelled", async () => {
  const [draw, cancelled] = [vi.fn(), vi.fn()];
  const [one, other] = [eachFrame(draw), eachFrame(cancelled)];
  one.soon();
  one.soon();
  other.soon();
  other.cancel();
  await frame();
  expect(draw).toHaveBeenCalledOnce();
  expect(cancelled).not.toHaveBeenCalled();
});
