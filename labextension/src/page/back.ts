// What the panel tells the widgets of a page, which do not hear how it stands with their kernel.

/** The name of the event: a connection to a kernel is there again. */
export const BACK = "monarch-nb-back";
