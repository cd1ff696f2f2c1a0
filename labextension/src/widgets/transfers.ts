import { widget } from "./widget";
import { transferView } from "../views/transfers";

export default widget(transferView);
