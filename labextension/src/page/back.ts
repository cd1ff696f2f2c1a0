// Events of a page for its widgets: what happens to their kernel, which only the panel can observe.

/** The name of the event: the connection to a kernel is restored. */
export const BACK = "monarch-nb-back";

/** The name of the event: a kernel has ended; its detail is the engine of that kernel. */
export const GONE = "monarch-nb-gone";
