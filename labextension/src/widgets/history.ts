import { widget } from "./widget";
import { historyView } from "../views/history";

export default widget(historyView);
