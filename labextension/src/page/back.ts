// Notifies the widgets of a page when their kernel is connected again, which only the panel can observe.

/** The name of the event: the connection to a kernel is restored. */
export const BACK = "monarch-nb-back";
