import { describe, expect, it, vi } from "vitest";

import { Cluster } from "../../src/cluster/client";
import type { FromKernel } from "../../src/cluster/messages";
import { drawKernelView } from "../../src/panel/kernelview";

interface Sent {
  type: string;
  id: string;
  verb?: string;
}

const SCRIPT = `export default { render({ model, el }) {
  const show = ({ type, ticks }) => { if (type === "clocks") el.textContent = ticks; };
  model.on("msg:custom", show);
  model.send({ type: "watch", topic: "clocks", id: "c1" });
  return () => { el.textContent = "ended"; };
} };`;

function kernel(): { cluster: Cluster; sent: Sent[]; tell: (message: object) => void } {
  const sent: Sent[] = [];
  let tell: (message: FromKernel) => void = () => undefined;
  const cluster = new Cluster({
    send: (message) => void sent.push(message as Sent),
    onMessage: (callback) => {
      tell = callback;
      return () => undefined;
    },
  });
  return { cluster, sent, tell: (message) => tell(message as FromKernel) };
}

function answer({ sent, tell }: ReturnType<typeof kernel>, reply: object): void {
  tell({ type: "reply", id: sent.find(({ verb }) => verb === "view")?.id, ...reply });
}

describe("a view that the kernel has brought", () => {
  it("is drawn with the kernel's module, hears what it watches, and is ended", async () => {
    const made = kernel();
    const root = document.createElement("div");
    const end = drawKernelView(made.cluster, "clocks", root);
    answer(made, { ok: true, result: { script: SCRIPT, style: ".c{color:red}" } });
    await vi.waitFor(() => expect(made.sent.at(-1)).toMatchObject({ type: "watch", topic: "clocks" }));
    made.tell({ type: "clocks", id: "c1", ticks: "3" });
    const el = root.querySelector("div");
    expect(el?.textContent).toBe("3");
    expect(root.querySelector("style")?.textContent).toBe(".c{color:red}");
    made.cluster.reconnected();
    expect(made.sent.filter(({ type }) => type === "watch")).toHaveLength(2);
    end();
    expect(el?.textContent).toBe("ended");
    made.tell({ type: "clocks", id: "c1", ticks: "4" });
    expect(el?.textContent).toBe("ended");
    expect(made.sent.at(-1)).toEqual({ type: "unwatch", id: "c1" });
  });

  it("that cannot be drawn says so", async () => {
    for (const [reply, text] of [
      [{ ok: false, error: "there is no view clocks any more" }, "there is no view clocks any more"],
      [{ ok: true, result: { script: "export default 3", style: "" } }, "no default export with a function render"],
    ] as const) {
      const made = kernel();
      const root = document.createElement("div");
      drawKernelView(made.cluster, "clocks", root);
      answer(made, reply);
      await vi.waitFor(() => expect(root.textContent).toContain(text));
    }
  });

  it("is named by the kernel, and forgotten with it", () => {
    const { cluster, tell } = kernel();
    const heard = vi.fn();
    cluster.watch(heard);
    tell({ type: "views", views: [{ name: "clocks", title: "Clocks" }] });
    expect(heard).toHaveBeenCalledWith(null);
    expect(cluster.views).toEqual([{ name: "clocks", title: "Clocks" }]);
    cluster.lost("the kernel was restarted", true);
    expect(cluster.views).toEqual([]);
  });
});
