#Requires -Version 5.1
<#
.SYNOPSIS
Installs swarmtrain on Windows: inside WSL, started by a task of yours at every logon. Or removes it.

.DESCRIPTION
The client needs Linux (its averaging has no build for Windows), so it runs inside the Windows
Subsystem for Linux, where this script calls installers/linux/install.sh as your own Linux user.
Nothing needs an administrator here. If WSL or a distribution is missing, the script says which
command an administrator has to run once, and changes nothing.

Everything is in functions, and the last line calls the first one: half a download does nothing.

.PARAMETER From
A wheel, a folder with the source, or a URL, as install.sh takes it. A path of Windows is translated.
Default: the checkout that this script lies in.

.PARAMETER Distribution
The WSL distribution to install into. Default: WSL's own default.

.PARAMETER NoTask
Makes no task: the client runs when you start it.

.PARAMETER Uninstall
Removes the task and the program. A client that runs is asked to end in order first. WSL and the
distribution stay: they are not this program's.

.PARAMETER Purge
With -Uninstall: identity, caches, preferences and logs as well. Nothing is left.

.EXAMPLE
powershell -ExecutionPolicy Bypass -File install.ps1 -WhatIf
Says what would be done, and does nothing.
#>
[CmdletBinding(SupportsShouldProcess = $true)]
param(
    [string] $From = '',
    [string] $Distribution = '',
    [switch] $NoTask,
    [switch] $Uninstall,
    [switch] $Purge
)

Set-StrictMode -Version 2.0
$ErrorActionPreference = 'Stop'

$TaskName = 'swarmtrain client'

function Invoke-Setup {
    [CmdletBinding(SupportsShouldProcess = $true)]
    param([string] $From, [string] $Distribution, [switch] $NoTask, [switch] $Uninstall, [switch] $Purge)
    try {
        $name = Get-WslDistribution -Wanted $Distribution
        $checkout = Split-Path -Parent (Split-Path -Parent $PSScriptRoot)
        $script = Join-Path $checkout 'installers\linux\install.sh'
        if (-not (Test-Path -LiteralPath $script)) {
            throw "There is no $script. Take the whole 'installers' folder, not this script alone."
        }
        if ($From -eq '') {
            $From = $checkout
        }
        if ($Uninstall) {
            $words = @('--uninstall')
            if ($Purge) {
                $words += '--purge'
            }
        } elseif ($From -match '^https?://') {
            $words = @('--from', $From)
        } else {
            if (-not (Test-Path -LiteralPath $From)) {
                throw "There is no $From. Name a wheel, a folder with the source, or a URL."
            }
            $source = (Resolve-Path -LiteralPath $From).Path
            $words = @('--from', (ConvertTo-WslPath -Distribution $name -Path $source))
        }
        $inside = ConvertTo-WslPath -Distribution $name -Path $script
        if ($PSCmdlet.ShouldProcess("the WSL distribution $name", "Run install.sh $words")) {
            & wsl.exe --distribution $name --exec sh $inside @words
            if ($LASTEXITCODE -ne 0) {
                throw "install.sh failed inside $name; its message above says why."
            }
        }
    } finally {
        # Also where WSL or the distribution is gone, and the task would fail at every logon.
        if ($Uninstall) {
            Unregister-ClientTask
        }
    }
    if (-not ($Uninstall -or $NoTask)) {
        Register-ClientTask -Distribution $name
    }
    if (-not ($Uninstall -or $WhatIfPreference)) {
        Write-Output "Installed. Next: wsl -d $name -e sh -lc '~/.local/bin/swarm-client join INVITE'"
    }
}

function Get-WslDistribution {
    [CmdletBinding()]
    param([string] $Wanted)
    if ($null -eq (Get-Command -Name 'wsl.exe' -ErrorAction SilentlyContinue)) {
        throw ("This Windows has no WSL. An administrator runs 'wsl --install' once and starts the " +
            'machine again; then run this script again, as yourself.')
    }
    # wsl.exe writes UTF-16, which arrives with a zero byte after each letter.
    $names = @(& wsl.exe --list --quiet | ForEach-Object { ($_ -replace "`0", '').Trim() } |
            Where-Object { $_ -ne '' })
    if ($names.Count -eq 0) {
        throw ("WSL has no distribution yet. Run 'wsl --install -d Debian', choose a user name when " +
            'it asks, and run this script again.')
    }
    if ($Wanted -eq '') {
        return $names[0]
    }
    if ($names -notcontains $Wanted) {
        throw "WSL has no distribution $Wanted; it has: $($names -join ', ')."
    }
    return $Wanted
}

function ConvertTo-WslPath {
    [CmdletBinding()]
    param([string] $Distribution, [string] $Path)
    $converted = & wsl.exe --distribution $Distribution --exec wslpath -a $Path
    if ($LASTEXITCODE -ne 0) {
        throw "$Path cannot be reached from inside $Distribution."
    }
    return ($converted | Select-Object -First 1)
}

function Register-ClientTask {
    [CmdletBinding(SupportsShouldProcess = $true)]
    param([string] $Distribution)
    if (-not $PSCmdlet.ShouldProcess("the scheduled task '$TaskName'", 'Register and start at logon')) {
        return
    }
    # The shell inside expands the tilde; Windows knows double quotes only.
    $arguments = "--distribution `"$Distribution`" --exec sh -c " +
        '"exec ~/.local/bin/swarm-client daemon"'
    $action = New-ScheduledTaskAction -Execute 'wsl.exe' -Argument $arguments
    $user = [System.Security.Principal.WindowsIdentity]::GetCurrent().Name
    $trigger = New-ScheduledTaskTrigger -AtLogOn -User $user
    # Limited: with the rights that you have without asking for more.
    $principal = New-ScheduledTaskPrincipal -UserId $user -LogonType Interactive -RunLevel Limited
    # On batteries the client itself decides, by its preferences.
    $settings = New-ScheduledTaskSettingsSet -AllowStartIfOnBatteries -DontStopIfGoingOnBatteries `
        -ExecutionTimeLimit ([TimeSpan]::Zero) -RestartCount 5 `
        -RestartInterval (New-TimeSpan -Minutes 1) -MultipleInstances IgnoreNew -Priority 7
    Register-ScheduledTask -TaskName $TaskName -Action $action -Trigger $trigger `
        -Principal $principal -Settings $settings -Force | Out-Null
    Start-ScheduledTask -TaskName $TaskName
}

function Unregister-ClientTask {
    [CmdletBinding(SupportsShouldProcess = $true)]
    param()
    if ($null -eq (Get-ScheduledTask -TaskName $TaskName -ErrorAction SilentlyContinue)) {
        return
    }
    if ($PSCmdlet.ShouldProcess("the scheduled task '$TaskName'", 'Stop and remove')) {
        Stop-ScheduledTask -TaskName $TaskName
        Unregister-ScheduledTask -TaskName $TaskName -Confirm:$false
    }
}

Invoke-Setup -From $From -Distribution $Distribution -NoTask:$NoTask -Uninstall:$Uninstall -Purge:$Purge
