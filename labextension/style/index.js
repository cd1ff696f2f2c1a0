import "../../kernel_ext/monarch_kernel/faces/static/style.css";
import "./panel.css";
