// Questions that the kernel has given up.

import { Signal } from "@lumino/signaling";
import { describe, expect, it } from "vitest";

import { QuestionGuard } from "../../src/panel/guard";

type Arguments = ConstructorParameters<typeof QuestionGuard>;

function notebook() {
  const kernel = {
    hasPendingInput: false,
    removeInputGuard(): void {
      kernel.hasPendingInput = false;
    },
  };
  const session = { kernel, anyMessage: new Signal<object, object>({}) };
  const context = { session, iopubMessage: new Signal<object, object>({}), sessionChanged: new Signal<object, object>({}) };
  new QuestionGuard(document.createElement("div"), context as unknown as Arguments[1]);
  const ask = (cell: string): void => {
    kernel.hasPendingInput = true;
    session.anyMessage.emit({ direction: "recv", msg: { header: { msg_type: "input_request" }, parent_header: { msg_id: cell } } });
  };
  const end = (cell: string): void => {
    context.iopubMessage.emit({ header: { msg_type: "status" }, parent_header: { msg_id: cell }, content: { execution_state: "idle" } });
  };
  return { kernel, ask, end };
}

describe("what a cell has asked", () => {
  it("is forgotten when that cell has ended, so that others can be run", () => {
    const { kernel, ask, end } = notebook();
    ask("first");
    end("first");
    expect(kernel.hasPendingInput).toBe(false);
  });

  it("waits for its answer while that cell runs, whatever else ends", () => {
    const { kernel, ask, end } = notebook();
    ask("first");
    end("a click on a subshell");
    expect(kernel.hasPendingInput).toBe(true);
  });
});
