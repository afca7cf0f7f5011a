// Tables that sort: a click, or Enter on the focused heading. A line under a row stays under it.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th");
    const table = head.closest("table");
    const index = [...head.parentNode.children].indexOf(head);
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const value = (row) => {
      const cell = row.children[index];
      return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
    };
    const all = [...table.tBodies[0].rows];
    const rows = all.filter((row) => !row.classList.contains("under"));
    const under = new Map(rows.map((row) => [row, row.nextElementSibling]));
    rows.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      return (x < y ? -1 : x > y ? 1 : 0) * (up ? 1 : -1);
    });
    for (const row of rows) {
      const next = under.get(row);
      table.tBodies[0].append(row);
      if (next && next.classList.contains("under")) table.tBodies[0].append(next);
    }
  });
}
