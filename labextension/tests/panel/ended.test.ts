import { Signal } from "@lumino/signaling";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";

vi.mock("@jupyterlab/apputils", () => ({ Notification: {} }));

const { EndNotices } = await import("../../src/panel/ended");

const notebook = { id: "n1", title: { label: "train.ipynb" } };
const ended = { type: "ended" as const, what: "In[5]", seconds: 123, asked: true, error: "" };
const front = { announced: new Signal<object, object>({}) };
const status = vi.fn();
const activate = vi.fn();
const settings = { desktopNotifications: false };
const desktop = { permission: vi.fn(() => "granted"), request: vi.fn(), say: vi.fn(), show: vi.fn() };
let looks: boolean;
let notices: InstanceType<typeof EndNotices>;

function send(message: object): void {
  front.announced.emit({ notebook, message });
}

beforeEach(() => {
  vi.useFakeTimers();
  vi.clearAllMocks();
  document.title = "JupyterLab";
  looks = false;
  vi.spyOn(document, "hasFocus").mockImplementation(() => looks);
  settings.desktopNotifications = false;
  Signal.clearData(front.announced);
  front.announced = new Signal<object, object>({});
  notices = new EndNotices(front as never, settings, status, activate, desktop);
});
afterEach(() => vi.useRealTimers());

describe("the end of a long cell", () => {
  it("is in the title until the page is looked at, and in the status bar for a while more", () => {
    send({ ...ended, error: "ValueError: no" });
    expect(document.title).toBe("✕ train.ipynb: In[5] failed after 2 min 03 s");
    expect(status).toHaveBeenLastCalledWith("train.ipynb: In[5] failed after 2 min 03 s", true);
    send(ended);
    looks = true;
    window.dispatchEvent(new Event("focus"));
    expect(document.title).toBe("JupyterLab");
    vi.advanceTimersByTime(29_000);
    expect(status).toHaveBeenLastCalledWith("train.ipynb: In[5] ended after 2 min 03 s", false);
    vi.advanceTimersByTime(2000);
    expect(status).toHaveBeenLastCalledWith("", false);
  });

  it("is on the desktop where somebody asked for it, and a click comes back", () => {
    send({ ...ended, asked: false });
    expect(desktop.show).not.toHaveBeenCalled();
    settings.desktopNotifications = true;
    send({ ...ended, asked: false });
    send(ended);
    expect(desktop.show).toHaveBeenCalledTimes(2);
    (desktop.show.mock.calls[0] as [string, string, () => void])[2]();
    expect(activate).toHaveBeenCalledWith(notebook);
  });

  it("is not on the desktop for a person who looks at the page, or where that is not allowed", () => {
    desktop.permission.mockReturnValueOnce("default");
    send(ended);
    looks = true;
    send(ended);
    expect(desktop.show).not.toHaveBeenCalled();
    expect(status).toHaveBeenCalledTimes(2);
  });
});

it("%notify asks for the permission where it is missing, by a button", () => {
  send({ type: "notify" });
  expect(desktop.say).not.toHaveBeenCalled();
  desktop.permission.mockReturnValueOnce("default");
  send({ type: "notify" });
  (desktop.say.mock.calls[0] as [string, string, () => void])[2]();
  expect(desktop.request).toHaveBeenCalled();
  desktop.permission.mockReturnValueOnce("denied");
  send({ type: "notify" });
  expect(desktop.say).toHaveBeenLastCalledWith(expect.stringContaining("does not let this page"));
});

it("a command asks the browser at once", () => {
  desktop.permission.mockReturnValueOnce("default");
  notices.permit(true);
  expect(desktop.request).toHaveBeenCalled();
  expect(desktop.say).not.toHaveBeenCalled();
});
