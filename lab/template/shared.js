"use strict";
// Light and dark: the reader's choice where there is one, else the system's.
const root = document.documentElement;
const remembered = () => { try { return localStorage.getItem("lab-theme"); } catch { return null; } };
const remember = (theme) => { try { localStorage.setItem("lab-theme", theme); } catch { /* files may have no storage */ } };
const systemTheme = () => (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
function setTheme(theme) {
  root.dataset.theme = theme;
  dispatchEvent(new CustomEvent("themechange"));
}
setTheme(remembered() ?? systemTheme());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => remembered() || setTheme(systemTheme()));
document.getElementById("theme").addEventListener("click", () => {
  const theme = root.dataset.theme === "dark" ? "light" : "dark";
  remember(theme);
  setTheme(theme);
});
