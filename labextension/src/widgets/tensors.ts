import { widget } from "./widget";
import { tensorView } from "../views/tensors";

export default widget(tensorView);
